/* approx.h: logarithm and exponential that a compiler can vectorise, the same on every machine and
 * in the Python twin: a fixed polynomial over the bits of a float, no fused multiply-add. */
#pragma once

#include <stdint.h>
#include <string.h>

/* ln x for a normal x > 0; off by at most 1e-6 + one rounding. */
static inline float fm_log(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const float exponent = (float)((bits >> 23) - 127);
    const int32_t mantissa = (bits & 0x7fffff) | 0x3f800000;
    float u;
    memcpy(&u, &mantissa, sizeof u);
    u -= 1.0f;
    float p = 0.013874484f;
    p = p * u - 0.06559031f;
    p = p * u + 0.14829414f;
    p = p * u - 0.2345452f;
    p = p * u + 0.33097526f;
    p = p * u - 0.499859f;
    p = p * u + 0.99999857f;
    return exponent * 0.6931472f + u * p;
}

/* 1 / (1 + e^-x), of x within -30 to 30; off by at most 1e-6 of the result. */
static inline float fm_sigmoid(float x) {
    x = x < -30.0f ? -30.0f : x;
    x = x > 30.0f ? 30.0f : x;
    const float power = 127.0f - x * 1.442695f; /* positive, so that the conversion rounds down */
    const int32_t whole = (int32_t)power;
    const float u = power - (float)whole;
    float p = 0.0018937538f;
    p = p * u + 0.008949591f;
    p = p * u + 0.055860337f;
    p = p * u + 0.24014182f;
    p = p * u + 0.69315451f;
    p = p * u + 0.99999988f;
    const int32_t bits = whole * (1 << 23);
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return 1.0f / (1.0f + scale * p);
}
