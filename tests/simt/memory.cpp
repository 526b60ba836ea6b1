// The executor's memory: shared memory poisoned before each block, asynchronous copies that land at a moment the program
// allows, fences and atomics for ThreadSanitizer, and the checks of alignment and bounds.
#include <pthread.h>

#include "runtime.h"

#if defined(SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#elif defined(SIMT_TSAN)
#include <sanitizer/tsan_interface.h>
extern "C" void __tsan_read_range(void*, unsigned long);
extern "C" void __tsan_write_range(void*, unsigned long);
extern "C" void __tsan_java_init(unsigned long, unsigned long);
extern "C" void __tsan_java_alloc(unsigned long, unsigned long);
extern "C" void __tsan_java_free(unsigned long, unsigned long);
#endif

namespace simt {

namespace {

// All bits set is a NaN as float, half, bfloat16 and both fp8 formats, and -1 as an integer.
constexpr unsigned char kPoison = 0xff, kCanary = 0xa5;

unsigned canary_bytes() { return std::min(4096u, kMaxShared - run.launch->shared_bytes); }

#if defined(SIMT_TSAN)
constexpr unsigned kMaxSyncs = 1 << 16;
alignas(8) char syncs[kMaxSyncs * 8];  // never read: places for ThreadSanitizer to keep clocks at
unsigned syncs_used;
#endif

bool in_shared(const void* address, unsigned bytes) {
  auto p = static_cast<const unsigned char*>(address);
  return p >= smem && p + bytes <= smem + run.launch->shared_bytes;
}

}  // namespace

void begin_launch() {
#if defined(SIMT_TSAN)
  // The functions meant for Java's collector forget what was recorded of a range. Any memory may be called Java's heap.
  static bool known;
  if (!known) __tsan_java_init(8, (1ul << 47) - 8);
  known = true;
#elif defined(SIMT_CHECKED)
  begin_checks();
#endif
  forget_trace();
}

void begin_block() {
  unsigned bytes = run.launch->shared_bytes;
#if defined(SIMT_ASAN)
  __asan_unpoison_memory_region(smem, kMaxShared);
#elif defined(SIMT_TSAN)
  __tsan_java_alloc(reinterpret_cast<unsigned long>(smem), kMaxShared);  // by the last block
#endif
  memset(smem, kPoison, bytes);
  memset(smem + bytes, kCanary, canary_bytes());
#if defined(SIMT_ASAN)
  __asan_poison_memory_region(smem + bytes, kMaxShared - bytes);
#elif defined(SIMT_TSAN)
  __tsan_java_alloc(reinterpret_cast<unsigned long>(smem), kMaxShared);  // by this filling
  // What is known of an address goes when its memory is freed: no block learns from another by an old meeting.
  if (syncs_used) __tsan_java_free(reinterpret_cast<unsigned long>(syncs), std::min(syncs_used, kMaxSyncs) * 8);
  syncs_used = 0;
#elif defined(SIMT_CHECKED)
  forget_shared();
#endif
}

void end_block() {
#if !defined(SIMT_ASAN)
  unsigned bytes = run.launch->shared_bytes;
  for (unsigned i = 0; i < canary_bytes(); ++i)
    if (smem[bytes + i] != kCanary) {
      report(nullptr, 0, "write past shared memory: byte %u, the launch has %u", bytes + i, bytes);
      return;
    }
#endif
  end_trace();
}

void find_thread_stack(void** bottom, size_t* bytes) {
  pthread_attr_t attributes;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, bottom, bytes);
  pthread_attr_destroy(&attributes);
}

void check_shared(const void* address, unsigned bytes, int write, Site site) {
  if (!in_shared(address, bytes))
    simt_fail(site.file, site.line, "access of %u bytes at %p is outside the launch's shared memory of %u bytes", bytes, address,
              run.launch->shared_bytes);
#if defined(SIMT_CHECKED)
  check_shared_state(address, bytes, write, site);
#elif defined(SIMT_TSAN)
  write ? __tsan_write_range(const_cast<void*>(address), bytes) : __tsan_read_range(const_cast<void*>(address), bytes);
#elif defined(SIMT_ASAN)
  (void)write;
#else
  (void)write;
#endif
}

void access_for_lane(Fiber* lane, const void* row, const WarpOp& op) {
  check_shared(row, 16, kRead, op.site);
  trace(lane, row, 16, kShared, kRead, op.site, op.caller);
}

// -------------------------------------------------------------------------------------------- asynchronous copies

namespace {

void land(const Copy& copy) {
#if defined(SIMT_TSAN)
  __tsan_write_range(copy.to, copy.bytes);
  __tsan_read_range(const_cast<unsigned char*>(copy.from), copy.valid);
#endif
  memcpy(copy.to, copy.from, copy.valid);
  memset(copy.to + copy.valid, 0, copy.bytes - copy.valid);
#if defined(SIMT_CHECKED)
  mark_shared(copy.to, copy.bytes, kInitialised);
#endif
}

}  // namespace

void land_copies(Fiber* fiber, unsigned first_left) {
  unsigned kept = 0;
  for (unsigned i = 0; i < fiber->num_copies; ++i) {
    if (fiber->copies[i].group < first_left)
      land(fiber->copies[i]);
    else
      fiber->copies[kept++] = fiber->copies[i];
  }
  fiber->num_copies = kept;
}

void maybe_land_copies(Fiber* fiber) {
  if (!fiber->num_copies || run.copies != kAnyTime) return;
  unsigned kept = 0;
  for (unsigned i = 0; i < fiber->num_copies; ++i) {
    if (run.random.below(4))
      fiber->copies[kept++] = fiber->copies[i];
    else
      land(fiber->copies[i]);
  }
  fiber->num_copies = kept;
}

}  // namespace simt

using namespace simt;

void simt_async_copy(void* to, const void* from, unsigned bytes, unsigned valid, const char* file, int line) {
  Fiber* me = run.current;
  Site site = {file, line};
  uintptr_t misaligned = (uintptr_t(to) | uintptr_t(from)) & (bytes - 1);
  if (misaligned) simt_fail(file, line, "misaligned cp.async of %u bytes: %p <- %p", bytes, to, from);
  if (!in_shared(to, bytes))
    simt_fail(file, line, "cp.async to %p is outside the launch's shared memory of %u bytes", to, run.launch->shared_bytes);
  if (in_shared(from, 1)) simt_fail(file, line, "cp.async reads shared memory at %p, it copies from global memory", from);
  const char* caller = static_cast<const char*>(__builtin_return_address(0));
  if (valid) trace(me, from, valid, kGlobal, kRead, site, caller);
  trace(me, to, bytes, kShared, kWrite, site, caller + 1);
#if defined(SIMT_CHECKED)
  if (valid) check_global(from, valid, kRead, site);
#elif defined(SIMT_TSAN)
  __tsan_write_range(to, bytes);  // it may land at once
#elif defined(SIMT_ASAN)
  if (valid) {  // read now as well: the report then shows the kernel's line
    volatile unsigned char first = *static_cast<const unsigned char*>(from);
    volatile unsigned char last = static_cast<const unsigned char*>(from)[valid - 1];
    (void)first, (void)last;
  }
#endif
  Copy copy = {static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), bytes, valid, me->committed, site};
  if (run.copies == kEarly) {
    land(copy);
    return;
  }
  memset(to, kPoison, bytes);  // what lies there until it lands is undefined
#if defined(SIMT_CHECKED)
  mark_shared(to, bytes, kInFlight);
#endif
  if (me->num_copies == kMaxCopies) simt_fail(file, line, "more than %u cp.async in flight in one thread", kMaxCopies);
  me->copies[me->num_copies++] = copy;
}

void simt_async_commit() { ++run.current->committed; }

void simt_async_wait(int groups_left) {
  Fiber* me = run.current;
  if (me->committed > unsigned(groups_left)) land_copies(me, me->committed - groups_left);
}

// ------------------------------------------------------------------------- accesses, approximations, fences, atomics

void simt_access(const void* address, unsigned bytes, int space, const char* file, int line) {
  if (uintptr_t(address) & (bytes - 1)) simt_fail(file, line, "misaligned access of %u bytes at %p", bytes, address);
  if (space == kShared && !in_shared(address, bytes)) {
    simt_fail(file, line, "access of %u bytes at %p is outside the launch's shared memory of %u bytes", bytes, address,
              run.launch->shared_bytes);
  } else if (space == kGlobal && in_shared(address, 1)) {
    simt_fail(file, line, "global access of %u bytes at %p, which is shared memory", bytes, address);
  }
#if defined(SIMT_CHECKED)
  if (space == kGlobal) check_read_only(address, {file, line});
#endif
}

float simt_approximate(double exact, double relative_error, unsigned input_bits) {
  float nearest = float(exact);
  if (!(fabs(exact) < 3e38) || exact == 1 || fabs(exact) < 0x1p-126) return nearest;
  Random random;
  random.seed(run.launch->model ^ input_bits * 0x9e3779b97f4a7c15ull);
  double u = double(random.next() >> 11) * 0x1p-52 - 1;        // in [-1, 1)
  return float(exact * (1 + u * (relative_error - 0x1p-24)));  // rounding to float takes the rest of the bound
}

void simt_fence() {
#if defined(SIMT_TSAN)
  Fiber* me = run.current;
  if (me->observed) __tsan_acquire(const_cast<void*>(me->observed));
  me->fenced = true;
#endif
}

void simt_atomic_begin(const void* address, unsigned bytes, const char* file, int line) {
  if (uintptr_t(address) & (bytes - 1)) simt_fail(file, line, "misaligned atomic of %u bytes at %p", bytes, address);
  if (++run.current->spins > 1000000)
    simt_fail(file, line, "thread %u waits here for another block; blocks may run one after another", run.current->linear);
}

// PTX ISA, "Memory Consistency Model": an atomic orders what a fence of the same thread stands before, and what it was followed by
// in the other thread; .acq_rel needs no fence.
void simt_atomic_end(const void* address, int acquires, int releases) {
#if defined(SIMT_TSAN)
  Fiber* me = run.current;
  if (acquires) __tsan_acquire(const_cast<void*>(address));
  if (releases || me->fenced) __tsan_release(const_cast<void*>(address));
  me->observed = address;
#else
  (void)address, (void)acquires, (void)releases;
#endif
}

namespace simt {

#if defined(SIMT_TSAN)
const void* next_sync() { return syncs + syncs_used++ % kMaxSyncs * 8; }
void happens_before(const void* sync) { __tsan_release(const_cast<void*>(sync)); }
void happens_after(const void* sync) { __tsan_acquire(const_cast<void*>(sync)); }
#else
const void* next_sync() { return nullptr; }
void happens_before(const void*) {}
void happens_after(const void*) {}
#endif

}  // namespace simt
