// The executor: runs the threads of a CUDA block as fibers of one OS thread, one block after another.
//
// A fiber runs until it must wait for others (barrier, warp operation) or ends; a seed chooses who runs next, in which order
// the blocks run and when asynchronous copies land. Every rule that is checked ends in `simt_fail`, which abandons the launch
// with a message. The same file is built four times: plain, checked (hooks.cpp sees every memory access), with
// AddressSanitizer and with ThreadSanitizer.
#include "runtime.h"

#include <sys/mman.h>
#include <xmmintrin.h>

#include <cstdarg>
#include <new>

#if defined(SIMT_ASAN)
#include <sanitizer/common_interface_defs.h>
#elif defined(SIMT_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

alignas(4096) unsigned char smem[simt::kMaxShared];
SimtThread* simt_thread;
uint3 simt_block_index;
dim3 simt_block_dim, simt_grid_dim;

namespace simt {

Run run;

namespace {

constexpr unsigned kMaxThreads = 1024;
#if defined(SIMT_ASAN) || defined(SIMT_TSAN)
constexpr size_t kStackBytes = 256 << 10;
#else
constexpr size_t kStackBytes = 128 << 10;
#endif

Fiber fibers[kMaxThreads];
Fiber scheduler;       // the context that `simt_launch` was called on
unsigned num_threads;  // of the running block
unsigned num_warps;
Warp warps[kMaxThreads / 32];

struct Barrier {
  unsigned arrived, generation;
  int reduction, value, result[2];
  Site site;
  const void* sync;
} barrier;

unsigned num_exited;
Fiber* first_exited;

// ------------------------------------------------------------------------------------------- context switch

// Saves the callee-saved registers and the stack pointer of the caller, continues at another saved stack pointer.
extern "C" void simt_switch(void** save, void* load);
asm(R"(
.text
.globl simt_switch
.hidden simt_switch
.type simt_switch, @function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch, .-simt_switch
)");

void switch_to(Fiber* next) {
  Fiber* me = run.current;
  run.current = next;
  simt_thread = next;
#if defined(SIMT_ASAN)
  __sanitizer_start_switch_fiber(&me->fake_stack, next->stack, next->stack_bytes);
  simt_switch(&me->sp, next->sp);
  __sanitizer_finish_switch_fiber(me->fake_stack, nullptr, nullptr);
#elif defined(SIMT_TSAN)
  __tsan_switch_to_fiber(next->tsan, __tsan_switch_to_fiber_no_sync);
  simt_switch(&me->sp, next->sp);
#else
  simt_switch(&me->sp, next->sp);
#endif
}

// ------------------------------------------------------------------------------------------------ scheduling

void make_runnable(Fiber* fiber) { warps[fiber->warp].runnable |= 1u << fiber->lane; }

// The next fiber to run, or the scheduler when none can.
Fiber* pick() {
  unsigned first = run.schedule == kUniform ? run.random.below(num_warps) : 0;
  for (unsigned i = 0; i < num_warps; ++i) {
    unsigned w = run.warp_order[first + i < num_warps ? first + i : first + i - num_warps];
    unsigned mask = warps[w].runnable;
    if (!mask) continue;
    unsigned turn = run.lane_turn ? run.lane_turn - 1 : unsigned(run.random.next() & 31);
    unsigned turned = mask >> turn | (turn ? mask << (32 - turn) : 0);
    unsigned lane = (unsigned(__builtin_ctz(turned)) + turn) & 31;
    warps[w].runnable &= ~(1u << lane);
    return &fibers[w * 32 + lane];
  }
  return &scheduler;
}

void wait_for_others() {
  Fiber* me = run.current;
  Fiber* next = pick();
  if (next != me) switch_to(next);
}

[[noreturn]] void leave() {  // this fiber never continues
  switch_to(run.failed ? &scheduler : pick());
  __builtin_unreachable();
}

void fiber_main() {
#if defined(SIMT_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  happens_after(&run.began);
  run.launch->entry(run.launch->params);
  Fiber* me = run.current;
  land_copies(me, ~0u);
  me->state = kExited;
  if (!first_exited) first_exited = me;
  ++num_exited;
  warps[me->warp].exited |= 1u << me->lane;
  if (barrier.arrived)
    simt_fail(barrier.site.file, barrier.site.line,
              "barrier not reached by all: thread %u of block (%u, %u, %u) ended while %u of %u threads wait here", me->linear,
              simt_block_index.x, simt_block_index.y, simt_block_index.z, barrier.arrived, num_threads);
  Warp& warp = warps[me->warp];
  for (unsigned i = 0; i < warp.pending; ++i)
    if (warp.ops[i].mask >> me->lane & 1)
      simt_fail(warp.ops[i].site.file, warp.ops[i].site.line,
                "warp operation with mask %08x: lane %u of warp %u ended while others wait for it here", warp.ops[i].mask, me->lane,
                me->warp);
  happens_before(&run.ended);
  leave();
}

void reset_fiber(Fiber* fiber, unsigned linear) {
  fiber->linear = linear;
  fiber->lane = linear & 31;
  fiber->warp = linear >> 5;
  fiber->index = {linear % simt_block_dim.x, linear / simt_block_dim.x % simt_block_dim.y,
                  linear / (simt_block_dim.x * simt_block_dim.y)};
  fiber->state = kReady;
  fiber->num_copies = fiber->committed = 0;
  fiber->fenced = false;
  fiber->observed = nullptr;
  fiber->epoch = fiber->spins = 0;
  fiber->site = {};
  // Tops of the stacks are spread over cache sets: equal low address bits would map all of them to the same few.
  uintptr_t top = uintptr_t(fiber->stack) + fiber->stack_bytes - (linear * 1088 & 16383);
  void** sp = reinterpret_cast<void**>(top & ~uintptr_t(63));
  *--sp = nullptr;  // keeps the entry's stack pointer at 8 modulo 16, as after a call
  *--sp = reinterpret_cast<void*>(fiber_main);
  for (int i = 0; i < 6; ++i) *--sp = nullptr;
  fiber->sp = sp;
}

// A stack, with ThreadSanitizer's record of what ran on it. Blocks are not ordered, but a record that two blocks used would order
// them; so a block takes the next records of a ring, and those of a launch repeat only past so many threads.
struct Context {
  void* stack;
  void* tsan;
};
Context contexts[kMaxThreads];

void assign_contexts() {
  static unsigned next;
#if !defined(SIMT_TSAN)
  next = 0;
#endif
  for (unsigned i = 0; i < num_threads; ++i) {
    Context& context = contexts[next++ % kMaxThreads];
    if (!context.stack) {
      // One page below each stack stays inaccessible, so that an overflow faults instead of reaching a neighbour.
      char* memory = static_cast<char*>(
          mmap(nullptr, kStackBytes + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
      if (memory == MAP_FAILED) throw std::bad_alloc();
      mprotect(memory, 4096, PROT_NONE);
      context.stack = memory + 4096;
#if defined(SIMT_TSAN)
      context.tsan = __tsan_create_fiber(0);
#endif
    }
    fibers[i].stack = context.stack;
    fibers[i].stack_bytes = kStackBytes;
    fibers[i].tsan = context.tsan;
  }
}

const char* name_of(State state) {
  switch (state) {
    case kAtBarrier:
      return "waits at a barrier";
    case kAtWarp:
      return "waits at a warp operation";
    case kExited:
      return "ended";
    default:
      return "is ready";
  }
}

void report_deadlock() {
  char text[400];
  int used = 0;
  State shown = kReady;
  for (unsigned i = 0; i < num_threads && used < 300; ++i) {
    if (fibers[i].state == shown) continue;
    shown = fibers[i].state;
    used += snprintf(text + used, sizeof text - used, "%sthread %u %s (%s:%d)", used ? ", " : "", i, name_of(shown),
                     fibers[i].site.file ? fibers[i].site.file : "-", fibers[i].site.line);
  }
  Site site = barrier.arrived ? barrier.site : fibers[0].site;
  if (barrier.arrived)
    report(site.file, site.line, "barrier not reached by all: %u of %u threads wait here; %s", barrier.arrived, num_threads, text);
  else
    report(site.file, site.line, "no thread can go on: %s", text);
}

void run_block(unsigned long long linear) {
  const dim3& grid = simt_grid_dim;
  simt_block_index = {unsigned(linear % grid.x), unsigned(linear / grid.x % grid.y),
                      unsigned(linear / (static_cast<unsigned long long>(grid.x) * grid.y))};
  begin_block();
  barrier.arrived = 0;
  num_exited = 0;
  first_exited = nullptr;
  for (unsigned w = 0; w < num_warps; ++w) {
    unsigned lanes = num_threads - w * 32 < 32 ? num_threads - w * 32 : 32;
    warps[w].pending = 0;
    warps[w].exited = 0;
    warps[w].lanes = warps[w].runnable = lanes == 32 ? ~0u : (1u << lanes) - 1;
    run.warp_order[w] = w;
  }
  for (unsigned w = num_warps - 1; w > 0; --w) {
    unsigned other = run.random.below(w + 1), kept = run.warp_order[w];
    run.warp_order[w] = run.warp_order[other];
    run.warp_order[other] = kept;
  }
  assign_contexts();
  for (unsigned i = 0; i < num_threads; ++i) reset_fiber(&fibers[i], i);
  switch_to(pick());
  if (!run.failed && num_exited < num_threads) report_deadlock();
  if (!run.failed) end_block();
}

}  // namespace

// ---------------------------------------------------------------------------------------------------- reports

void report(const char* file, int line, const char* format, ...) {
  if (run.failed) return;
  run.failed = true;
  va_list arguments;
  va_start(arguments, format);
  int used = !file  ? 0
             : line ? snprintf(run.error, run.error_bytes, "%s:%d: ", file, line)
                    : snprintf(run.error, run.error_bytes, "%s: ", file);
  vsnprintf(run.error + used, run.error_bytes - used, format, arguments);
  va_end(arguments);
}

// ------------------------------------------------------------------------------------------- warp operations

namespace {

void complete(Warp& warp, unsigned slot) {
  WarpOp op = warp.ops[slot];
  warp.ops[slot] = warp.ops[--warp.pending];
  run_warp_op(op, &fibers[(&warp - warps) * 32]);
  for (unsigned left = op.mask & ~(1u << run.current->lane); left; left &= left - 1) {
    Fiber* fiber = &fibers[(&warp - warps) * 32 + __builtin_ctz(left)];
    fiber->state = kReady;
    make_runnable(fiber);
  }
}

}  // namespace
}  // namespace simt

using namespace simt;

void simt_fail(const char* file, int line, const char* format, ...) {
  char text[800];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  report(file, line, "%s", text);
  leave();
}

void simt_warp(int kind, unsigned mask, unsigned detail, void* argument, const char* file, int line) {
  Fiber* me = run.current;
  Warp& warp = warps[me->warp];
  maybe_land_copies(me);
  ++me->epoch;
  me->spins = 0;
  me->site = {file, line};
  if (!(mask >> me->lane & 1))
    simt_fail(file, line, "warp operation with mask %08x is executed by lane %u, which the mask does not name", mask, me->lane);
  if (mask & ~warp.lanes)
    simt_fail(file, line, "mask %08x names lanes that do not exist: the warp has lanes %08x", mask, warp.lanes);
  if (mask & warp.exited)
    simt_fail(file, line, "warp operation with mask %08x: lanes %08x of warp %u have ended", mask, mask & warp.exited, me->warp);
  unsigned slot = 0;
  for (; slot < warp.pending; ++slot) {
    WarpOp& op = warp.ops[slot];
    if (op.mask == mask) {
      if (op.kind != kind || op.detail != detail || op.site.line != line || strcmp(op.site.file, file))
        simt_fail(file, line, "lanes of warp %u disagree: lane %u is here, lanes %08x are at %s:%d", me->warp, me->lane, op.arrived,
                  op.site.file, op.site.line);
      break;
    }
    if (op.mask & mask)
      simt_fail(file, line, "lanes of warp %u disagree: mask %08x of lane %u overlaps mask %08x of lanes %08x at %s:%d", me->warp,
                mask, me->lane, op.mask, op.arrived, op.site.file, op.site.line);
  }
  if (slot == warp.pending) {
    warp.ops[slot] = {kind, mask, 0, detail, {file, line}, __builtin_return_address(0), next_sync(), {}};
    ++warp.pending;
  }
  WarpOp& op = warp.ops[slot];
  op.arrived |= 1u << me->lane;
  op.arguments[me->lane] = argument;
  const void* sync = op.sync;
  if (kind == kSyncWarp) happens_before(sync);
  if (op.arrived == mask) {
    complete(warp, slot);
  } else {
    me->state = kAtWarp;
    wait_for_others();
  }
  if (kind == kSyncWarp) happens_after(sync);
}

int simt_barrier(int predicate, int reduction, const char* file, int line) {
  Fiber* me = run.current;
  maybe_land_copies(me);
  ++me->epoch;
  me->spins = 0;
  me->site = {file, line};
  if (num_exited)
    simt_fail(file, line, "barrier not reached by all: thread %u had already ended when thread %u arrived here",
              first_exited->linear, me->linear);
  if (!barrier.arrived) {
    barrier.site = {file, line};
    barrier.reduction = reduction;
    barrier.value = reduction == 2;
    barrier.sync = next_sync();
  } else if (barrier.site.line != line || barrier.reduction != reduction || strcmp(barrier.site.file, file)) {
    simt_fail(file, line, "threads wait at different barriers: thread %u here, %u others at %s:%d", me->linear, barrier.arrived,
              barrier.site.file, barrier.site.line);
  }
  if (reduction == 1) barrier.value |= predicate != 0;
  if (reduction == 2) barrier.value &= predicate != 0;
  if (reduction == 3) barrier.value += predicate != 0;
  unsigned generation = barrier.generation;
  const void* sync = barrier.sync;
  happens_before(sync);
  if (++barrier.arrived == num_threads) {
    barrier.result[generation & 1] = barrier.value;
    barrier.arrived = 0;
    ++barrier.generation;
    for (unsigned w = 0; w < num_warps; ++w) warps[w].runnable = warps[w].lanes;
    for (unsigned i = 0; i < num_threads; ++i) fibers[i].state = kReady, fibers[i].fenced = false, fibers[i].observed = nullptr;
    warps[me->warp].runnable &= ~(1u << me->lane);
  } else {
    me->state = kAtBarrier;
    wait_for_others();
  }
  happens_after(sync);
  return barrier.result[generation & 1];
}

// ------------------------------------------------------------------------------------------------------- launch

extern "C" __attribute__((visibility("default"))) int simt_launch(const Launch* launch, char* error, unsigned error_bytes) {
  run.launch = launch;
  run.failed = false;
  run.error = error;
  run.error_bytes = error_bytes;
  error[0] = 0;
  run.random.seed(launch->seed);
  run.schedule = run.random.below(2) ? kUniform : kWarpByWarp;
  run.lane_turn = run.random.below(3) ? 0 : 1 + run.random.below(32);
  run.copies = Copies(launch->copies >= 0 ? launch->copies : int(run.random.below(3)));
  simt_block_dim = dim3(launch->block[0], launch->block[1], launch->block[2]);
  simt_grid_dim = dim3(launch->grid[0], launch->grid[1], launch->grid[2]);
  num_threads = simt_block_dim.x * simt_block_dim.y * simt_block_dim.z;
  num_warps = (num_threads + 31) / 32;
  run.current = &scheduler;
#if defined(SIMT_TSAN)
  scheduler.tsan = __tsan_get_current_fiber();
#elif defined(SIMT_ASAN)
  if (!scheduler.stack) find_thread_stack(&scheduler.stack, &scheduler.stack_bytes);
#endif
  unsigned control = _mm_getcsr();
  _mm_setcsr(control | 0x8040);  // flush-to-zero and denormals-are-zero, as -ftz=true does on the device
  begin_launch();
  happens_before(&run.began);
  unsigned long long blocks = static_cast<unsigned long long>(simt_grid_dim.x) * simt_grid_dim.y * simt_grid_dim.z;
  // Every block once, in an order that jumps about: a step coprime to the count.
  unsigned long long step = blocks > 2 ? 1 + run.random.next() % (blocks - 1) : 1, at = blocks ? run.random.next() % blocks : 0;
  for (; std::__gcd(step, blocks) != 1;) step = step % (blocks - 1) + 1;
  for (unsigned long long i = 0; i < blocks && !run.failed; ++i, at = (at + step) % blocks) run_block(at);
  happens_after(&run.ended);
  _mm_setcsr(control);
  return run.failed;
}
