// What the lanes of a warp compute together: shuffles, votes, ldmatrix, mma. Layouts are those of the PTX manual, sections
// "mma.m16n8k8", "mma.m16n8k16" and "ldmatrix". With lane t, g = t / 4 and c = t % 4:
//   A, value (v0, v1, v2): row g + 8 v1, column 2 c + v0 + 8 v2     B, value (v0, v1): row 2 c + v0 + 8 v1, column g
//   C and D, value (v0, v1): row g + 8 v1, column 2 c + v0          (a register holds v0 = 0 low and v0 = 1 high)
#include <xmmintrin.h>

#include "runtime.h"

namespace simt {

namespace {

float half_bits_to_float(unsigned short bits) {
  static float* table;
  if (!table) {
    table = new float[65536];
    for (unsigned i = 0; i < 65536; ++i) {
      int exponent = i >> 10 & 31, mantissa = i & 1023;
      float value = exponent == 31 ? (mantissa ? NAN : INFINITY)
                    : exponent     ? ldexpf(float(1024 + mantissa), exponent - 25)
                                   : ldexpf(float(mantissa), -24);
      table[i] = i & 0x8000 ? -value : value;
    }
  }
  return table[bits];
}

float element(unsigned word, int high, bool bfloat16) {
  unsigned short bits = high ? word >> 16 : word & 0xffff;
  return bfloat16 ? __uint_as_float(unsigned(bits) << 16) : half_bits_to_float(bits);
}

float toward_zero(double value) {
  float nearest = float(value);
  if (fabs(double(nearest)) > fabs(value) && std::isfinite(value)) nearest = nextafterf(nearest, 0.0f);
  return nearest;
}

// D = A B + C. Products are exact; each run of 8 is added to the accumulator and the sum is cut toward zero, as tensor cores
// were measured to do (Fasi, Higham, Mikaitis, Pranesh: Numerical behavior of NVIDIA tensor cores, 2021).
void run_mma(const WarpOp& op) {
  unsigned control = _mm_getcsr();
  _mm_setcsr(control & ~0x8040u);  // mma keeps subnormal inputs
  int depth = op.detail & 31;
  bool bfloat16 = op.detail & kMmaBfloat16;
  float a[16][16], b[16][8];
  for (int t = 0; t < 32; ++t) {
    auto mma = static_cast<const SimtMma*>(op.arguments[t]);
    int g = t / 4, c = t % 4;
    for (int v2 = 0; v2 < depth / 8; ++v2)
      for (int v0 = 0; v0 < 2; ++v0) {
        for (int v1 = 0; v1 < 2; ++v1) a[g + 8 * v1][2 * c + v0 + 8 * v2] = element(mma->a[2 * v2 + v1], v0, bfloat16);
        b[2 * c + v0 + 8 * v2][g] = element(mma->b[v2], v0, bfloat16);
      }
  }
  for (int t = 0; t < 32; ++t) {
    float* d = static_cast<const SimtMma*>(op.arguments[t])->d;
    for (int v = 0; v < 4; ++v) {
      int row = t / 4 + 8 * (v / 2), column = 2 * (t % 4) + v % 2;
      float sum = d[v];
      for (int k = 0; k < depth; k += 8) {
        double exact = sum;
        for (int i = k; i < k + 8; ++i) exact += double(a[row][i]) * double(b[i][column]);
        sum = toward_zero(exact);
      }
      d[v] = sum;
    }
  }
  _mm_setcsr(control);
}

// Lane 8 m + r holds the address of row r of matrix m. Register j of lane t: matrix j, row t / 4, elements 2 (t % 4) and the
// next; transposed: rows 2 (t % 4) and the next of column t / 4.
void run_load_matrix(const WarpOp& op, Fiber* lanes) {
  int count = op.detail & 7;
  bool transposed = op.detail >> 3;
  unsigned short rows[32][8];
  for (int l = 0; l < 8 * count; ++l) {
    const void* row = static_cast<SimtLoadMatrix*>(op.arguments[l])->row;
    if (uintptr_t(row) & 15) simt_fail(op.site.file, op.site.line, "misaligned ldmatrix row of lane %d: %p", l, row);
    access_for_lane(&lanes[l], row, op);
    memcpy(rows[l], row, 16);
  }
  for (int t = 0; t < 32; ++t) {
    unsigned* registers = static_cast<SimtLoadMatrix*>(op.arguments[t])->registers;
    int g = t / 4, c = t % 4;
    for (int j = 0; j < count; ++j) {
      unsigned low = transposed ? rows[8 * j + 2 * c][g] : rows[8 * j + g][2 * c];
      unsigned high = transposed ? rows[8 * j + 2 * c + 1][g] : rows[8 * j + g][2 * c + 1];
      registers[j] = low | high << 16;
    }
  }
}

void run_shuffle(const WarpOp& op) {
  unsigned long long values[32];
  for (int t = 0; t < 32; ++t)
    if (op.mask >> t & 1) values[t] = static_cast<SimtShuffle*>(op.arguments[t])->value;
  for (int t = 0; t < 32; ++t) {
    if (!(op.mask >> t & 1)) continue;
    auto shuffle = static_cast<SimtShuffle*>(op.arguments[t]);
    if (!(op.mask >> shuffle->source & 1))
      simt_fail(op.site.file, op.site.line, "shuffle with mask %08x: lane %d reads lane %u, which the mask does not name", op.mask,
                t, shuffle->source);
    shuffle->value = values[shuffle->source];
  }
}

void run_vote(const WarpOp& op) {
  unsigned ballot = 0;
  for (int t = 0; t < 32; ++t)
    if (op.mask >> t & 1 && static_cast<SimtVote*>(op.arguments[t])->predicate) ballot |= 1u << t;
  for (int t = 0; t < 32; ++t)
    if (op.mask >> t & 1) static_cast<SimtVote*>(op.arguments[t])->ballot = ballot;
}

}  // namespace

void run_warp_op(const WarpOp& op, Fiber* lanes) {
  switch (op.kind) {
    case kShuffle:
      return run_shuffle(op);
    case kVote:
      return run_vote(op);
    case kLoadMatrix:
      return run_load_matrix(op, lanes);
    case kMma:
      return run_mma(op);
    default:
      return;
  }
}

}  // namespace simt
