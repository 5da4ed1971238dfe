// Kernel calls that were recorded, run again in their order.
#pragma once

namespace {

struct Call {
  void (*kernel)(const void*);
  const void* fields;
};

struct Replay {
  const Call* calls;
  int64_t count;
};

}  // namespace

KERNEL(replay, Replay) {
  for (int64_t i = 0; i < it->count; ++i) it->calls[i].kernel(it->calls[i].fields);
}
