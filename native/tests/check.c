/* check.c: main() of every test program. */

#include "check.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TESTS = 64, FAILED = 1, NO_SUCH_TEST = 2, SKIPPED = 77 };

static struct {
    const char *name;
    check_function function;
} tests[MAX_TESTS];
static int n_tests;
static const char *directory;

void check_register(const char *name, check_function function) {
    if (n_tests == MAX_TESTS) {
        check_failed(__FILE__, __LINE__, "more than %d tests in one file", MAX_TESTS);
    }
    tests[n_tests].name = name;
    tests[n_tests++].function = function;
}

void check_failed(const char *file, int line, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "%s:%d: ", file, line);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    fflush(stderr);
    _Exit(FAILED); /* other threads may still run, and a leak report would only hide the cause */
}

void check_skip(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    putchar('\n');
    va_end(args);
    fflush(stdout);
    _Exit(SKIPPED);
}

void check_equal(const char *file, int line, const char *what, long long is, long long expected) {
    if (is != expected) {
        check_failed(file, line, "%s is %lld, not %lld", what, is, expected);
    }
}

void check_text(const char *file, int line, const char *text, const char *part) {
    if (strstr(text, part) == NULL) {
        check_failed(file, line, "no '%s' in '%s'", part, text);
    }
}

const char *check_path(const char *name) {
    static _Thread_local char path[4096];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return path;
}

unsigned check_random(unsigned long long *state) {
    unsigned long long x = *state;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    *state = x;
    return (unsigned)(x >> 32);
}

int main(int argc, char **argv) {
    if (argc < 2) {
        for (int i = 0; i < n_tests; i++) {
            puts(tests[i].name);
        }
        return 0;
    }
    directory = argv[1];
    int n_run = 0;
    for (int i = 0; i < n_tests; i++) {
        if (argc < 3 || strcmp(argv[2], tests[i].name) == 0) {
            tests[i].function();
            printf("ok %s\n", tests[i].name);
            n_run++;
        }
    }
    return n_run > 0 ? 0 : NO_SUCH_TEST;
}
