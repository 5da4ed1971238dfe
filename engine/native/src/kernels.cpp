// The one unit that is compiled: every kernel, and whether this processor can run them.
#include "common.h"

// Outside of the pragma: it must run on any processor.
extern "C" EXPORTED int tandem_runs_here() {
  return __builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("avx512vnni");
}

#include <immintrin.h>
#pragma GCC target("arch=x86-64-v4,avx512bf16,avx512vnni")
#include "avx512.h"
#include "functions.h"
#include "threads.h"

#include "attention.h"
#include "convolution.h"
#include "elementwise.h"
#include "delta_rule.h"
#include "linear.h"
#include "linear_int8.h"
#include "norms.h"

#include "attention_segment.h"
#include "experts.h"
#include "replay.h"
#include "router.h"
#include "ssd.h"
#include "ssd_segment.h"
