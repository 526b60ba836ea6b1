// Shared by the executor's files: the state of a launch, its fibers and its warps.
#pragma once

#include <algorithm>
#include <vector>

#include "simt.h"

namespace simt {

constexpr unsigned kMaxShared = 256 << 10;  // more than any architecture's limit

struct Site {
  const char* file;
  int line;
};

struct Launch {  // filled in by launcher.py
  void (*entry)(const void* params);
  const void* params;
  unsigned grid[3], block[3];
  unsigned shared_bytes;
  int copies;                    // when asynchronous copies land: -1 the seed decides, else a value of `Copies`
  unsigned long long seed;       // schedule
  unsigned long long model;      // errors of approximate instructions: the same device model gives the same bits
  const struct Region* regions;  // [num_regions], sorted by address: what a kernel may touch (checked build)
  unsigned long long num_regions;
  int traced;
};

struct Region {
  uintptr_t begin, end;
};

struct Random {  // splitmix64
  unsigned long long state;
  void seed(unsigned long long value) { state = value; }
  unsigned long long next() {
    unsigned long long z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  unsigned below(unsigned n) { return unsigned((next() >> 32) * n >> 32); }
};

enum State { kReady, kAtBarrier, kAtWarp, kExited };
enum Schedule { kUniform, kWarpByWarp };
enum Copies { kLate, kEarly, kAnyTime };

struct Copy {  // a cp.async that has not landed
  unsigned char* to;
  const unsigned char* from;
  unsigned bytes, valid, group;
  Site site;
};

constexpr unsigned kMaxCopies = 512;  // in flight per thread

struct Fiber : SimtThread {
  void* sp;
  void* stack;
  size_t stack_bytes;
  State state;
  Site site;  // where it waits
  unsigned num_copies;
  Copy copies[kMaxCopies];  // pending, oldest first
  unsigned committed;       // groups so far
  unsigned epoch;           // barriers and warp operations so far
  unsigned spins;           // atomics since the last of them
  bool fenced;              // a fence since the last barrier
  const void* observed;     // an atomic that was read since the last barrier
  void* fake_stack;         // AddressSanitizer
  void* tsan;               // ThreadSanitizer
};

struct WarpOp {  // lanes that wait for one another
  int kind;
  unsigned mask, arrived, detail;
  Site site;
  const void* caller;  // return address, tells one inlined copy of a source line from another
  const void* sync;
  void* arguments[32];
};

struct Warp {
  unsigned lanes, runnable, exited, pending;
  WarpOp ops[32];
};

struct Run {
  const Launch* launch;
  Fiber* current;
  Random random;
  Schedule schedule;
  unsigned lane_turn;  // 0: any lane; else lanes in ascending order from this one less one
  Copies copies;
  unsigned warp_order[32];
  bool failed;
  char* error;
  unsigned error_bytes;
  char began, ended;  // addresses for ThreadSanitizer's happens-before
};
extern Run run;

void report(const char* file, int line, const char* format, ...) __attribute__((format(printf, 3, 4)));

// warp.cpp: what a completed warp operation computes; `lanes` are the 32 fibers of the warp.
void run_warp_op(const WarpOp& op, Fiber* lanes);

// memory.cpp
void begin_launch();
void begin_block();
void end_block();
void maybe_land_copies(Fiber* fiber);
void land_copies(Fiber* fiber, unsigned groups_left);
const void* next_sync();  // an address for ThreadSanitizer, new for every meeting of threads
void happens_before(const void* sync);
void happens_after(const void* sync);
void check_shared(const void* address, unsigned bytes, int write, Site site);
void access_for_lane(Fiber* lane, const void* row, const WarpOp& op);  // one 16-byte row of ldmatrix
void find_thread_stack(void** bottom, size_t* bytes);

// hooks.cpp, checked build: what every byte of shared memory holds, and which global bytes may be touched
enum SharedState : unsigned char { kUninitialised, kInitialised, kInFlight };
void begin_checks();
void forget_shared();
void mark_shared(const void* address, unsigned bytes, SharedState state);
void check_shared_state(const void* address, unsigned bytes, int write, Site site, const void* pc = nullptr);
void check_read_only(const void* address, Site site);
void check_global(const void* address, unsigned bytes, int write, Site site, const void* pc = nullptr);

// trace.cpp
void forget_trace();
void end_trace();
void trace(Fiber* fiber, const void* address, unsigned bytes, int space, int write, Site site, const void* key);

}  // namespace simt
