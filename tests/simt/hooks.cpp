// The checked build: g++'s ThreadSanitizer instrumentation calls a function for every memory access, and UndefinedBehavior-
// Sanitizer's calls one for every misaligned pointer, signed overflow and bad shift. Their own libraries are not linked; the
// functions are here. So every access of a kernel is compared with the arrays of the launch and with what shared memory holds,
// inside the test's own process, and counted by trace.cpp.
#include "runtime.h"

#if defined(SIMT_CHECKED)
#include <dlfcn.h>
#include <link.h>

namespace simt {

namespace {

SharedState shared_state[kMaxShared];

struct Image {  // memory of one loaded object
  uintptr_t begin, end;
};
Image images[2];  // of the executor and of the running kernel: their constants and variables are no arrays of the launch

int find_image(dl_phdr_info* info, size_t, void* argument) {
  auto image = static_cast<Image*>(argument);
  uintptr_t inside = image->begin;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    uintptr_t begin = info->dlpi_addr + header.p_vaddr;
    if (header.p_type != PT_LOAD || inside < begin || inside >= begin + header.p_memsz) continue;
    for (int j = 0; j < info->dlpi_phnum; ++j) {
      const auto& part = info->dlpi_phdr[j];
      if (part.p_type != PT_LOAD) continue;
      image->begin = std::min(image->begin, info->dlpi_addr + part.p_vaddr);
      image->end = std::max(image->end, info->dlpi_addr + part.p_vaddr + part.p_memsz);
    }
    return 1;
  }
  return 0;
}

bool in_images(uintptr_t address) {
  return (address >= images[0].begin && address < images[0].end) || (address >= images[1].begin && address < images[1].end);
}

enum : unsigned char { kReadOnly = 1, kWritten = 2 };
std::vector<unsigned char> region_uses;  // of the launch so far

// A site for messages: launcher.py turns the address into file and line.
Site at(const void* pc) {
  static char text[600];
  Dl_info info = {};
  dladdr(pc, &info);
  snprintf(text, sizeof text, "{%s+0x%lx}", info.dli_fname, uintptr_t(pc) - 1 - uintptr_t(info.dli_fbase));
  return {text, 0};
}

// The read-only path may serve what its cache holds, whatever was written since: an array that a launch reads there is one that
// it does not write.
void use_region(unsigned long long i, unsigned char use, Site site, const void* pc) {
  region_uses[i] |= use;
  if (region_uses[i] != (kReadOnly | kWritten)) return;
  if (pc) site = at(pc);
  simt_fail(site.file, site.line, "an array of %llu bytes is written and read through the read-only path in one launch",
            static_cast<unsigned long long>(run.launch->regions[i].end - run.launch->regions[i].begin));
}

void accessed(const void* address, unsigned bytes, int write, const void* pc) {
  Fiber* me = run.current;
  uintptr_t a = uintptr_t(address);
  if (a - uintptr_t(me->stack) < me->stack_bytes) return;
  if (a - uintptr_t(smem) < kMaxShared) {
    check_shared_state(address, bytes, write, {nullptr, 0}, pc);
    trace(me, address, bytes, kShared, write, {nullptr, 0}, pc);
  } else if (!in_images(a)) {
    check_global(address, bytes, write, {nullptr, 0}, pc);
    trace(me, address, bytes, kGlobal, write, {nullptr, 0}, pc);
  }
}

}  // namespace

void begin_checks() {
  region_uses.assign(run.launch->num_regions, 0);
  images[0] = {uintptr_t(&images), uintptr_t(&images)};
  images[1] = {uintptr_t(run.launch->entry), uintptr_t(run.launch->entry)};
  dl_iterate_phdr(find_image, &images[0]);
  dl_iterate_phdr(find_image, &images[1]);
}

void check_read_only(const void* address, Site site) {
  for (unsigned long long i = 0; i < run.launch->num_regions; ++i)
    if (uintptr_t(address) >= run.launch->regions[i].begin && uintptr_t(address) < run.launch->regions[i].end)
      return use_region(i, kReadOnly, site, nullptr);
}

void forget_shared() { memset(shared_state, kUninitialised, run.launch->shared_bytes); }

void mark_shared(const void* address, unsigned bytes, SharedState state) {
  memset(shared_state + (static_cast<const unsigned char*>(address) - smem), state, bytes);
}

void check_shared_state(const void* address, unsigned bytes, int write, Site site, const void* pc) {
  unsigned long offset = static_cast<const unsigned char*>(address) - smem;
  if (offset + bytes > run.launch->shared_bytes) {
    if (pc) site = at(pc);
    simt_fail(site.file, site.line, "%s of %u bytes at byte %lu of shared memory; the launch has %u bytes",
              write ? "write" : "read", bytes, offset, run.launch->shared_bytes);
  }
  for (unsigned i = 0; i < bytes; ++i) {
    SharedState state = shared_state[offset + i];
    if (state == kInitialised) continue;
    if (state == kInFlight || !write) {
      if (pc) site = at(pc);
      simt_fail(site.file, site.line, "%s of shared memory at byte %lu, %s (thread %u)", write ? "write" : "read", offset + i,
                state == kInFlight ? "which a cp.async in flight will write" : "which nobody wrote in this block",
                run.current->linear);
    }
    shared_state[offset + i] = kInitialised;
  }
}

void check_global(const void* address, unsigned bytes, int write, Site site, const void* pc) {
  static unsigned long long last;
  uintptr_t a = uintptr_t(address);
  const Launch& launch = *run.launch;
  auto holds = [&](unsigned long long i) {
    return i < launch.num_regions && a >= launch.regions[i].begin && a + bytes <= launch.regions[i].end;
  };
  if (!holds(last))
    for (last = 0; last < launch.num_regions && !holds(last);) ++last;
  if (holds(last)) {
    if (write) use_region(last, kWritten, site, pc);
    return;
  }
  const Region* nearest = nullptr;  // the array that ends or begins next to the access
  unsigned long long best = ~0ull;
  for (unsigned long long i = 0; i < launch.num_regions; ++i) {
    const Region& region = launch.regions[i];
    unsigned long long distance = a >= region.begin ? a - region.begin : region.begin - a;
    if (distance < best) best = distance, nearest = &region;
  }
  if (pc) site = at(pc);
  if (nearest)
    simt_fail(site.file, site.line, "%s of %u bytes outside every array of the launch: at byte %lld of an array of %llu bytes",
              write ? "write" : "read", bytes, static_cast<long long>(a - nearest->begin),
              static_cast<unsigned long long>(nearest->end - nearest->begin));
  simt_fail(site.file, site.line, "%s of %u bytes at %p: the launch has no arrays", write ? "write" : "read", bytes, address);
}

}  // namespace simt

using namespace simt;

#pragma GCC visibility push(default)
extern "C" {

#define SIMT_HOOKS(N)                                                                              \
  void __tsan_read##N(void* p) { accessed(p, N, kRead, __builtin_return_address(0)); }             \
  void __tsan_write##N(void* p) { accessed(p, N, kWrite, __builtin_return_address(0)); }           \
  void __tsan_unaligned_read##N(void* p) { accessed(p, N, kRead, __builtin_return_address(0)); }   \
  void __tsan_unaligned_write##N(void* p) { accessed(p, N, kWrite, __builtin_return_address(0)); } \
  void __tsan_volatile_read##N(void* p) { accessed(p, N, kRead, __builtin_return_address(0)); }    \
  void __tsan_volatile_write##N(void* p) { accessed(p, N, kWrite, __builtin_return_address(0)); }
SIMT_HOOKS(1)
SIMT_HOOKS(2)
SIMT_HOOKS(4)
SIMT_HOOKS(8)
SIMT_HOOKS(16)
#undef SIMT_HOOKS
void __tsan_read_range(void* p, unsigned long n) { accessed(p, unsigned(n), kRead, __builtin_return_address(0)); }
void __tsan_write_range(void* p, unsigned long n) { accessed(p, unsigned(n), kWrite, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}

unsigned __tsan_atomic32_load(const volatile unsigned* p, int) {
  accessed(const_cast<unsigned*>(p), 4, kRead, __builtin_return_address(0));
  return *p;
}
void __tsan_atomic32_store(volatile unsigned* p, unsigned value, int) {
  accessed(const_cast<unsigned*>(p), 4, kWrite, __builtin_return_address(0));
  *p = value;
}
unsigned long __tsan_atomic64_load(const volatile unsigned long* p, int) {
  accessed(const_cast<unsigned long*>(p), 8, kRead, __builtin_return_address(0));
  return *p;
}
void __tsan_atomic64_store(volatile unsigned long* p, unsigned long value, int) {
  accessed(const_cast<unsigned long*>(p), 8, kWrite, __builtin_return_address(0));
  *p = value;
}

// What g++ passes to the handlers of UndefinedBehaviorSanitizer (libsanitizer, ubsan_handlers.h): a place first, then details.
struct UbsanPlace {
  const char* file;
  unsigned line, column;
};
struct UbsanMismatch {
  UbsanPlace place;
  void* type;
  unsigned char log_alignment, kind;
};
void __ubsan_handle_type_mismatch_v1(UbsanMismatch* data, unsigned long address) {
  simt_fail(data->place.file, data->place.line, "misaligned pointer 0x%lx: the access needs %d bytes", address,
            1 << data->log_alignment);
}
#define SIMT_OVERFLOW(name)                                                                \
  void __ubsan_handle_##name##_overflow(UbsanPlace* place, unsigned long, unsigned long) { \
    simt_fail(place->file, place->line, "signed integer overflow (" #name ")");            \
  }
SIMT_OVERFLOW(add)
SIMT_OVERFLOW(sub)
SIMT_OVERFLOW(mul)
SIMT_OVERFLOW(negate)
SIMT_OVERFLOW(divrem)
#undef SIMT_OVERFLOW
void __ubsan_handle_shift_out_of_bounds(UbsanPlace* place, unsigned long value, unsigned long count) {
  simt_fail(place->file, place->line, "bad shift: %ld by %ld", long(value), long(count));
}
}
#pragma GCC visibility pop
#endif  // SIMT_CHECKED
