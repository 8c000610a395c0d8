/* check.h: a test harness in one page. A test is TEST(name) { ... }; it ends at its first failed
 * check. `test_x` lists its tests, `test_x DIRECTORY NAME` runs one and `test_x DIRECTORY` all of
 * them; it exits with 0, 1 (failed), 2 (no such test) or 77 (skipped, the reason on stdout). */
#pragma once

#include <stddef.h>

typedef void (*check_function)(void);

void check_register(const char *name, check_function function);
_Noreturn void check_failed(const char *file, int line, const char *format, ...) __attribute__((format(printf, 3, 4)));
_Noreturn void check_skip(const char *format, ...) __attribute__((format(printf, 1, 2)));
void check_equal(const char *file, int line, const char *what, long long is, long long expected);
void check_text(const char *file, int line, const char *text, const char *part);

/* A path in the test's own directory; valid until the next call. */
const char *check_path(const char *name);

/* The same numbers every time: xorshift. */
unsigned check_random(unsigned long long *state);

#define TEST(name)                                                              \
    static void name(void);                                                     \
    __attribute__((constructor)) static void register_##name(void) {            \
        check_register(#name, name);                                            \
    }                                                                           \
    static void name(void)

#define CHECK(condition) ((condition) ? (void)0 : check_failed(__FILE__, __LINE__, "not true: %s", #condition))
#define CHECK_EQUAL(is, expected) check_equal(__FILE__, __LINE__, #is, (long long)(is), (long long)(expected))
#define CHECK_TEXT(text, part) check_text(__FILE__, __LINE__, text, part)
