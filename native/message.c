/* message.c: the text of the last failure, one per thread. */

#include <stdarg.h>
#include <stdio.h>

#include "api.h"

static _Thread_local char last_message[512];

const char *fm_last_message(void) {
    return last_message;
}

int32_t fm_fail(enum fm_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(last_message, sizeof last_message, format, args);
    va_end(args);
    return status;
}
