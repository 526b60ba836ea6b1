// What the attention kernels share around their inner loops: the parameter struct, work items, bounds of packed rows, the merge of
// warps and of partial results, and the rows of `out`.
//
// Work       The query heads of one KV head times the query rows of one sequence are its packed rows: row r, head g of the group at
//            r * group + g. A unit is up to kRows packed rows of one sequence. Its keys are cut into items of tokens. blockIdx.y is
//            the KV head; blockIdx.x walks the items of its share of a plan (kPlanned), or is one (unit, split) whose range follows
//            from the lengths in device memory. With 4 query heads to a KV head packed row 7 is head 3 of query row 1.
// Partials   Float32, [num_partials, num_kv_heads, kRows, head_dim], beside their softmax states. The last block of a unit to
//            finish, by an integer ticket, merges them in index order, so the bits do not depend on who came last. A partial of 8
//            rows with head_dim 128 and 8 KV heads is 8 * 8 * 128 * 4 = 32,768 bytes of sums and 512 of states.
// Prefixes   Sequences whose tables begin with the same blocks may form a group. One launch attends to the keys of the groups'
//            prefixes: there a unit is packed rows of a group, over the rows of all its sequences, and leaves its states and sums
//            as they are. The launches after it attend to what is a sequence's own, and add the prefix when a row is finished.
// Expects    kRows, kWarps, kTokens, kHeadDim, kQueryType, kPlanned, kFewestRows, kMostRows, kParamsBytes as constants.
#pragma once
#include "paged_kv.cuh"
#include "softmax_state.cuh"
#include "types.cuh"

struct Item {
  int unit, first, last, partial;  // tokens [first, last); partial < 0: the item is the whole unit
};
struct Unit {
  int sequence, row, first_partial, num_partials;  // first packed row
};

struct SharedGroup {
  int sequence, row, num_rows;  // whose table is read; rows [row, row + num_rows) of shared_rows
  int length;                   // keys [0, length): every row sees all of them
};
struct SharedRow {
  int token, position;
};

struct Params {
  PagedKV kv;
  const kQueryType* q;
  kQueryType* out;
  float* lse;                                                 // null: not asked for
  long long q_token, q_head, out_token, out_head, lse_token;  // strides in elements
  const float* alibi_slopes;                                  // [num_heads], null without kAlibi
  const float* sinks;                                         // [num_heads] or null
  const float* k_scale;                                       // [num_kv_heads]
  const float* v_scale;                                       // [num_kv_heads]
  const int* seq_lens;                                        // [num_seqs]
  const int* query_start_loc;                                 // [num_seqs + 1]
  const int* share_start;                                     // [gridDim.x + 1], items of each share of the plan
  const Item* items;
  const Unit* units;
  float* partials;                                // [num_partials, num_kv_heads, kRows, head_dim]
  SoftmaxState* partial_states;                   // [num_partials, num_kv_heads, kRows]
  unsigned* tickets;                              // [num_units, num_kv_heads], 0 between launches
  const SharedGroup* shared_groups;               // not null: this launch is over prefixes, and a unit's `sequence` is a group
  const SharedRow* shared_rows;                   // [num_shared_rows]
  const int* first_shared_row;                    // [num_seqs], -1: the sequence is in no group; null: none is
  float* shared_sums;                             // [num_shared_rows, num_heads, head_dim]
  SoftmaxState* shared_states;                    // [num_shared_rows, num_heads]
  int num_seqs, num_tokens, group, num_kv_heads;  // num_tokens: rows of out
  int causal, window, chunk, splits;              // window, chunk: 0 = none; splits: without a plan
  float scale, softcap;
};
static_assert(sizeof(Params) == kParamsBytes, "the host packs another struct");

extern __shared__ __align__(128) unsigned char smem[];

constexpr int kThreads = kWarps * 32;
constexpr int kLaneDims = (kHeadDim + 31) / 32;  // entries lane, lane + 32, ... of head_dim that a lane finishes

// Lengths and where queries begin; in debug mode within tables and rows, also where only the device knows them.
__device__ __forceinline__ int length_of(const Params& p, int sequence) {
#if kDebug
  return max(0, min(p.seq_lens[sequence], p.kv.max_blocks * p.kv.block_size));
#else
  return p.seq_lens[sequence];
#endif
}
__device__ __forceinline__ int start_of(const Params& p, int sequence) {
#if kDebug
  return max(0, min(p.query_start_loc[sequence], p.num_tokens));
#else
  return p.query_start_loc[sequence];
#endif
}

struct Row {  // what a packed row may see, and where it stands
  int lo, hi, position;
  float slope;
};

// Keys [lo, hi) that a query at `position` may see.
__device__ __forceinline__ Row row_bounds(const Params& p, int seq_len, int position) {
  Row row = {0, p.causal ? position + 1 : seq_len, position, 0.0f};
  if (position < 0) {
    row.hi = 0;
    return row;
  }
  if (p.window) row.lo = max(row.lo, position - p.window + 1);
  if (p.chunk) {
    const int start = position / p.chunk * p.chunk;
    row.lo = max(row.lo, start);
    row.hi = min((long long)row.hi, (long long)start + p.chunk);
  }
  return row;
}

struct Task {                         // an item with everything that is read from metadata
  int sequence, head, row, num_rows;  // packed rows [row, row + num_rows) of KV head `head`
  int token;                          // where the sequence's queries begin; of a group, in shared_rows
  int seq_len, before;                // position of query row 0
  int first, last;                    // keys that some row sees, [first, last), perhaps none
  int clean_lo, clean_hi;             // keys that every row sees
};

__device__ __forceinline__ Task make_task(const Params& p, int head, const Item& item, const Unit& unit) {
  Task task;
  task.head = head, task.row = unit.row;
  if (p.shared_groups) {
    const SharedGroup group = p.shared_groups[unit.sequence];
    task.sequence = group.sequence, task.token = group.row, task.seq_len = group.length, task.before = 0;
    task.num_rows = min(kRows, group.num_rows * p.group - unit.row);
    task.first = item.first, task.last = item.last, task.clean_lo = 0, task.clean_hi = group.length;
    return task;
  }
  task.sequence = unit.sequence;
  task.token = start_of(p, unit.sequence);
  const int num_queries = start_of(p, unit.sequence + 1) - task.token;
  task.seq_len = length_of(p, unit.sequence);
  task.num_rows = min(kRows, num_queries * p.group - unit.row);
  task.before = task.seq_len - num_queries;
  const Row low = row_bounds(p, task.seq_len, task.before + unit.row / p.group);
  const Row high = row_bounds(p, task.seq_len, task.before + (unit.row + task.num_rows - 1) / p.group);
  task.first = max(item.first, low.lo), task.last = min(item.last, high.hi);
  task.clean_lo = high.lo, task.clean_hi = low.hi;
  return task;
}

// The element of q, out or lse where packed row `row` of the task begins, with these strides.
__device__ __forceinline__ long long row_offset(const Params& p, const Task& task, int row, long long token, long long head) {
  const int packed = task.row + row;
  int of = task.token + packed / p.group;
  if (p.shared_groups) of = p.shared_rows[of].token;
  return of * token + (task.head * p.group + packed % p.group) * head;
}

// Bounds of every row of the tile, by the block's threads; rows past the task's repeat its last.
__device__ __forceinline__ void load_rows(const Params& p, const Task& task, Row* rows) {
  for (int r = threadIdx.x; r < kRows; r += kThreads) {
    const int packed = task.row + min(r, task.num_rows - 1);
    Row bounds;
    if (p.shared_groups) {
      bounds = {0, task.seq_len, kAlibi ? p.shared_rows[task.token + packed / p.group].position : 0, 0.0f};
    } else {
      bounds = row_bounds(p, task.seq_len, task.before + packed / p.group);
    }
    if (kAlibi) bounds.slope = p.alibi_slopes[task.head * p.group + packed % p.group];
    rows[r] = bounds;
  }
}

// Write one finished row: this lane's `sums` of exp * v over the state of all its keys, or all but a shared prefix's. `v_factor`:
// of a value over what was summed.
__device__ __forceinline__ void finish_row(const Params& p, const Task& task, int row, const SoftmaxState& state, const float* sums,
                                           float v_factor) {
  const int lane = threadIdx.x % 32, packed = task.row + row, q_head = task.head * p.group + packed % p.group;
  const int shared_row = p.shared_groups ? task.token : p.first_shared_row ? p.first_shared_row[task.sequence] : -1;
  const long long at = (long long)(shared_row + packed / p.group) * (p.num_kv_heads * p.group) + q_head;
  if (p.shared_groups) {
    if (lane == 0) p.shared_states[at] = state;
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) {
      if (i * 32 + lane < kHeadDim) p.shared_sums[at * kHeadDim + i * 32 + lane] = sums[i];
    }
    return;
  }
  SoftmaxState whole = state;
  float own = 1.0f, shared = 0.0f;
  if (shared_row >= 0) {
    const SoftmaxState prefix = p.shared_states[at];
    whole.max = fmaxf(state.max, prefix.max);
    own = exp_above(state.max, anchor(whole.max)), shared = exp_above(prefix.max, anchor(whole.max));
    whole.sum = fmaf(prefix.sum, shared, state.sum * own);
  }
  const float keep = (p.sinks ? whole.normalizer(p.sinks[q_head]) : whole.normalizer()) * p.v_scale[task.head] * v_factor;
  kQueryType* out = p.out + row_offset(p, task, row, p.out_token, p.out_head);
#pragma unroll
  for (int i = 0; i < kLaneDims; ++i) {
    if (i * 32 + lane < kHeadDim) {
      float sum = sums[i];
      if (shared_row >= 0) sum = fmaf(p.shared_sums[at * kHeadDim + i * 32 + lane], shared, sum * own);
      out[i * 32 + lane] = from_float<kQueryType>(sum * keep);
    }
  }
  if (p.lse && lane == 0) p.lse[row_offset(p, task, row, p.lse_token, 1)] = whole.lse();
}

// `count` states and their sums, merged in index order: state(i) and the address of sums(i) of one row.
template <class States, class Sums>
__device__ __forceinline__ SoftmaxState merge_row(int count, const States& state, const Sums& sums,
                                                  float (&merged_sums)[kLaneDims]) {
  const int lane = threadIdx.x % 32;
  SoftmaxState merged = {negative_infinity(), 0.0f};
  for (int i = lane; i < count; i += 32) merged.max = fmaxf(merged.max, state(i).max);
#pragma unroll
  for (int flip = 16; flip > 0; flip /= 2) merged.max = fmaxf(merged.max, __shfl_xor_sync(0xffffffffu, merged.max, flip));
  const float base = anchor(merged.max);
#pragma unroll
  for (int j = 0; j < kLaneDims; ++j) merged_sums[j] = 0.0f;
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    const SoftmaxState part = state(i);
    const float weight = exp_above(part.max, base);
    if (part.empty()) continue;  // its sums need not be there
    const float* from = sums(i);
    merged.sum = fmaf(part.sum, weight, merged.sum);
#pragma unroll
    for (int j = 0; j < kLaneDims; ++j) {
      if (j * 32 + lane < kHeadDim) merged_sums[j] = fmaf(from[j * 32 + lane], weight, merged_sums[j]);
    }
  }
  return merged;
}

// Whether this block is the last of its unit's; all its writes so far are then visible to the one that is, and the others' to it.
__device__ __forceinline__ bool last_of_unit(const Params& p, const Item& item, const Unit& unit, int head, int* flag) {
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned* ticket = p.tickets + (long long)item.unit * p.num_kv_heads + head;
    const bool last = atomic_add_acq_rel(ticket, 1u) == unsigned(unit.num_partials - 1);
    if (last) *ticket = 0;  // for the next launch
    *flag = last;
  }
  __syncthreads();
  return *flag;
}

// The end of an item. kParts warps have left states [kParts][kRows] and sums in shared memory, part w of row r at
// sums + w * part_floats + r * row_floats; they become rows of `out`, or a partial and perhaps the merge of all partials.
template <int kParts>
__device__ __forceinline__ void finish_task(const Params& p, const Task& task, const Item& item, const Unit& unit,
                                            const SoftmaxState* states, const float* sums, int part_floats, int row_floats,
                                            float v_factor, int* flag) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float merged[kLaneDims];
  __syncthreads();
  for (int r = warp; r < task.num_rows; r += kWarps) {
    const SoftmaxState state = merge_row(
        kParts, [&](int w) { return states[w * kRows + r]; }, [&](int w) { return sums + w * part_floats + r * row_floats; },
        merged);
    if (item.partial < 0) {
      finish_row(p, task, r, state, merged, v_factor);
      continue;
    }
    const long long at = ((long long)item.partial * p.num_kv_heads + task.head) * kRows + r;
    if (lane == 0) p.partial_states[at] = state;
    if (state.empty()) continue;
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) {
      if (i * 32 + lane < kHeadDim) p.partials[at * kHeadDim + i * 32 + lane] = merged[i];
    }
  }
  if (item.partial < 0 || !last_of_unit(p, item, unit, task.head, flag)) return;
  for (int r = warp; r < task.num_rows; r += kWarps) {
    const long long stride = (long long)p.num_kv_heads * kRows;
    const long long begin = ((long long)unit.first_partial * p.num_kv_heads + task.head) * kRows + r;
    const SoftmaxState state = merge_row(
        unit.num_partials, [&](int i) { return p.partial_states[begin + i * stride]; },
        [&](int i) { return p.partials + (begin + i * stride) * kHeadDim; }, merged);
    finish_row(p, task, r, state, merged, v_factor);
  }
}

// Rows of `out` past the last sequence's are padding: empty.
__device__ __forceinline__ void clear_padding(const Params& p, int head) {
  const int width = p.group * kHeadDim;
  for (int token = start_of(p, p.num_seqs) + blockIdx.x; token < p.num_tokens; token += gridDim.x) {
    for (int i = threadIdx.x; i < width; i += kThreads) {
      const int q_head = head * p.group + i / kHeadDim;
      p.out[token * p.out_token + q_head * p.out_head + i % kHeadDim] = from_float<kQueryType>(0.0f);
      if (p.lse && i % kHeadDim == 0) p.lse[token * p.lse_token + q_head] = negative_infinity();
    }
  }
}

// Calls run(item, unit) for every item of this block.
template <class Run>
__device__ __forceinline__ void for_each_item(const Params& p, const Run& run) {
#if kPlanned
  for (int i = p.share_start[blockIdx.x]; i < p.share_start[blockIdx.x + 1]; ++i) {
    const Item item = p.items[i];
    run(item, p.units[item.unit]);
  }
#else
  // Unit numbers rise with the sequence: sequence s owns those from query_start_loc[s] * group / kRows + s on, perhaps more than it
  // has.
  const int unit = blockIdx.x / p.splits, split = blockIdx.x % p.splits;
  int sequence = 0;
  for (int above = p.num_seqs; above - sequence > 1;) {
    const int middle = (sequence + above) / 2;
    const long long begin = (long long)start_of(p, middle) * p.group / kRows + middle;
    (begin <= unit ? sequence : above) = middle;
  }
  const int start = start_of(p, sequence), num_queries = start_of(p, sequence + 1) - start;
  const long long row = (unit - ((long long)start * p.group / kRows + sequence)) * kRows;
  const long long packed = (long long)num_queries * p.group;
  if (row >= packed || packed < kFewestRows || packed > kMostRows) return;  // another kernel may take other sequences
  const int seq_len = length_of(p, sequence);
  // The split's edges: in tiles, from the first key that any row of the sequence may see. plan.py cuts the same way.
  const int base = row_bounds(p, seq_len, max(seq_len - num_queries, 0)).lo / kTokens;
  const int tiles = max((seq_len + kTokens - 1) / kTokens - base, 0);
  const int per_split = (tiles + p.splits - 1) / p.splits;
  const long long begin = (long long)(base + (long long)split * per_split) * kTokens;
  const Item item = {unit, int(min(begin, (long long)seq_len)),
                     int(min(begin + (long long)per_split * kTokens, (long long)seq_len)),
                     p.splits > 1 ? unit * p.splits + split : -1};
  run(item, Unit{sequence, int(row), unit * p.splits, p.splits});
#endif
}
