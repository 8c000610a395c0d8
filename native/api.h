/* api.h: flashmoe.h for C, with what its declarations need, and the per-thread message. */
#pragma once

#include <stdint.h>

#include "flashmoe.h"

/* Sets fm_last_message() and returns the status it was given. */
int32_t fm_fail(enum fm_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));
