// Products and attention of a few rows, float32, for XLA's foreign function interface on a CPU.
//
//   product             y [M, F] = f(x [M, K]) · w + bias + residual, f a norm, an activation or nothing, w in panels of 16 columns: float32 [ceil(F/16), K, 16], or int8 with a
//                       scale for each column, [ceil(F/16), ceil(K/4), 16, 4], for inputs that are rounded to 16 or 8 bits
//   keys, values        of such a product, by heads
//   head                of such a product the greatest column of each row and its log-probability; y itself is never stored
//   norm                f(x), the norm alone
//   log-sums            log Σ exp of rows, in the order of the head
//   put                 rows in the place of others
//   rows                of a table [N, D], by their numbers
//   angles, heads       queries, keys and values side by side, the first two normalised by heads and rotated by angles
//   attention           of queries over cached keys and values, of an encoder over its own
//
// Every output is one chain of operations in a fixed order (of a product with float32: fused multiply-adds over
// k = 0 .. K - 1; with int8: exact sums over each 512 inputs, which are rounded to 16 or 8 bits, then multiply-adds of those;
// of an attention: over the live slots of its own row and nothing past them). So the bits of a row depend neither on how many
// rows there are, nor on its neighbours, nor on the number of threads.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif
#if defined(__AMX_INT8__) && defined(__AVX512F__) && defined(__linux__)
#define SPECDEC_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

// ---------------------------------------------------------------------------------------------------------------- vectors

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRegisters = 32;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif
constexpr int kPanel = 16, kParts = kPanel / kLanes;
constexpr int kAhead = 256;    // lines, of all panels side by side, from where it reads to where it asks for
constexpr int kSlotsAhead = 8;  // of an attention: from the key that is read to the one that is asked for
constexpr int64_t kGroup = 96; // rows whose partial sums are kept at a time

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef float Loose __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef int16_t Shorts __attribute__((vector_size(4 * kLanes)));
typedef int32_t Lines __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));
typedef double Doubles __attribute__((vector_size(kLanes * 8)));

static inline Vec load(const float* p) { return *reinterpret_cast<const Loose*>(p); }
static inline void store(float* p, Vec v) { *reinterpret_cast<Loose*>(p) = v; }
// The first n of them, if that is less; 0 in the place of the others.
static inline Vec load(const float* p, int64_t n) {
  if (n >= kLanes) return load(p);
  float own[kLanes] = {};
  std::memcpy(own, p, sizeof(float) * n);
  return load(own);
}
static inline void store(float* p, Vec v, int64_t n) {
  if (n >= kLanes) return store(p, v);
  float own[kLanes];
  store(own, v);
  std::memcpy(p, own, sizeof(float) * n);
}
static inline Vec all(float x) { return x - Vec{}; }

// The vector turned by kBy numbers, in a form for which compilers have one instruction.
template <int kBy, typename V, int... I>
static inline V turned(V v, std::integer_sequence<int, I...>) {
  return V{v[(I + kBy) % kLanes]...};
}

// Its numbers brought together by `join`, halves first.
template <int kWidth = kLanes / 2, typename V, typename Join>
static inline auto folded(V v, const Join& join) {
  if constexpr (kWidth == 0) return v[0];
  else return folded<kWidth / 2>(join(v, turned<kWidth>(v, std::make_integer_sequence<int, kLanes>())), join);
}
template <typename V>
static inline auto sum_of(V v) {
  return folded(v, [](V a, V b) { return a + b; });
}
template <int kWidth, typename Join, int... I>
static inline Vec merged(Vec a, Vec b, const Join& join, std::integer_sequence<int, I...>) {
  return join(Vec{(I & kWidth ? b[(I ^ kWidth) % kLanes] : a[I])...}, Vec{(I & kWidth ? b[I] : a[(I ^ kWidth) % kLanes])...});
}
// Of kLanes vectors what `folded` makes of each, with its bits.
template <int kWidth = 1, typename Join>
static inline Vec all_folded(const Vec* v, const Join& join) {
  if constexpr (kWidth == kLanes) return *v;
  else
    return merged<kWidth>(all_folded<2 * kWidth>(v, join), all_folded<2 * kWidth>(v + kWidth, join), join,
                          std::make_integer_sequence<int, kLanes>());
}
// Of the first few, what is made of the others being left open.
template <typename Join>
static inline Vec some_folded(const Vec* v, int count, const Join& join) {
  if (count > kLanes / 4) return all_folded(v, join);
  float own[kLanes] = {};
  for (int i = 0; i < count; i++) own[i] = folded(v[i], join);
  return load(own);
}
static inline Vec sums_of(const Vec* v) {
  return all_folded(v, [](Vec a, Vec b) { return a + b; });
}
template <typename V>
static inline auto greatest_of(V v) {
  return folded(v, [](V a, V b) { return b > a ? b : a; });
}

constexpr float kShift = 12582912.0f;  // 1.5 · 2^23: what is added to it is rounded to an integer

// e^x for x <= 0, within 2 units in the last place; 0 below −87.
static inline Vec exp_of(Vec x) {
  const Vec lowest = all(-87.0f);
  const Ints dead = x < lowest;
  x = dead ? lowest : x;
  const Vec n = (x * 1.44269504f + kShift) - kShift;
  const Vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vec p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Vec e = (p * r * r + r) + 1.0f;
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  const Vec result = e * (Vec)power;
  return dead ? Vec{} : result;
}

// tanh x, within a few units in the last place: a quotient of polynomials, as in Eigen and XLA; beyond 7.9 it is 1.
static inline Vec tanh_of(Vec x) {
  x = x > 7.90531110763549805f ? all(7.90531110763549805f) : x < -7.90531110763549805f ? all(-7.90531110763549805f) : x;
  const Vec y = x * x;
  Vec over = all(-2.76076847742355e-16f);
  for (float c : {2.00018790482477e-13f, -8.60467152213735e-11f, 5.12229709037114e-08f, 1.48572235717979e-05f,
                  6.37261928875436e-04f, 4.89352455891786e-03f})
    over = over * y + c;
  Vec under = all(1.19825839466702e-06f);
  for (float c : {1.18534705686654e-04f, 2.26843463243900e-03f, 4.89352518554385e-03f}) under = under * y + c;
  return x * over / under;
}

// c · tanh(x / c). Not inlined, and so with the same bits wherever it is called.
static __attribute__((noinline)) Vec capped(Vec x, float c) { return c * tanh_of(x / c); }

// Numbers below the smallest normal one count as 0 while this lives, on whatever thread: XLA's own threads do so, others may not.
struct NoDenormals {
#if defined(__x86_64__)
  unsigned before = _mm_getcsr();
  NoDenormals() { _mm_setcsr(before | 0x8040); }
  ~NoDenormals() { _mm_setcsr(before); }
#elif defined(__aarch64__)
  uint64_t before;
  NoDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before));
    asm volatile("msr fpcr, %0" ::"r"(before | (1 << 24)));
  }
  ~NoDenormals() { asm volatile("msr fpcr, %0" ::"r"(before)); }
#endif
};

// ---------------------------------------------------------------------------------------------------------------- threads

static inline void rest() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// What the threads of a call share. A helper that comes too late finds nothing left and touches nothing else, so that the
// caller waits only for helpers at work: a pool whose threads are all callers cannot lock up.
struct Shared {
  std::atomic<int64_t> next{0}, done{0};
  int64_t total, grain;
};

template <typename Do>
static void work(Shared& s, const Do& f) {
  NoDenormals mode;
  for (;;) {
    const int64_t first = s.next.fetch_add(s.grain, std::memory_order_relaxed);
    if (first >= s.total) return;
    const int64_t last = first + s.grain < s.total ? first + s.grain : s.total;
    f(first, last);
    s.done.fetch_add(last - first, std::memory_order_release);
  }
}

// f(first, last) for parts of 0 .. total, `grain` at a time, on the pool's threads and this one. `worth`: about how many
// threads there is work for.
template <typename Do>
static void in_parallel(ffi::ThreadPool& pool, int64_t total, int64_t grain, int64_t worth, const Do& f) {
  int64_t threads = pool.num_threads() < worth ? pool.num_threads() : worth;
  if (threads < 2 || total < 2) {
    NoDenormals mode;
    return f(int64_t{0}, total);
  }
  if (grain > total / (2 * threads)) grain = total / (2 * threads);
  auto shared = std::make_shared<Shared>();
  shared->total = total;
  shared->grain = grain < 1 ? 1 : grain;
  for (int64_t t = 1; t < threads; t++) pool.Schedule([shared, f] { work(*shared, f); });
  work(*shared, f);
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < total;)
    ++spins < 20000 ? rest() : std::this_thread::yield();
}

// --------------------------------------------------------------------------------------------------------------- products

// Most rows of a block over so many panels side by side: registers hold all sums and a line of the panels, which a single row
// takes from memory.
constexpr int rows_for(int panels) {
  int rows = 1;
  while ((rows + (rows > 1)) * panels * kParts < kRegisters) rows++;
  return rows - 1;
}
// Few rows, which wait for memory, are one block, over as many panels as then fit: their sums hide an addition's latency. Many
// are blocks of the squarest shape, kWide panels.
constexpr int kWide = kParts == 1 ? 4 : 1;

// Tiles of AMX: 16 rows of 64 bytes. Rows of inputs are whole tiles then, one after the other.
constexpr int kTileRows = 16, kTileBytes = 64, kTile = kTileRows * kTileBytes, kTilePanels = 2, kSums = kTileRows * kPanel;
constexpr int kTiledFrom = 2;  // rows: a single one waits for the memory anyway
#ifdef SPECDEC_TILES
// The tiles of a thread while this lives: six of at most so many rows for sums and inputs, two for weights.
struct Tiles {
  explicit Tiles(int64_t rows) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, none[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    for (int i = 0; i < 6 && rows < kTileRows; i++) shape.rows[i] = rows;
    asm volatile("" ::"r"(&shape) : "memory");  // compilers do not know all that the next instruction reads
    _tile_loadconfig(&shape);
  }
  ~Tiles() { _tile_release(); }
};

// Whether Linux lets this process use tiles, for which it must be asked: it keeps their 8 KiB for each thread.
static bool may_use_tiles() {
  constexpr int kAskFor = 0x1023, kTileData = 18;
  static const bool granted = !syscall(SYS_arch_prctl, kAskFor, kTileData);
  return granted;
}
#else
static bool may_use_tiles() { return false; }
#endif

// How a part of a row of inputs was rounded: the factor of its integers, and what the sums of its products begin with.
struct Rounding {
  float scale;
  int32_t start;
};

// How weights of a kind are multiplied. `Input`: what meets a line of a panel, of a row; `Sum`: of kLanes columns. `Integer`: to
// which each of the numbers in an `Input` is rounded, kInputs of them, −kMost to kMost; kPart: lines of panels that stay in the
// cache while all blocks of rows pass over them, and whose inputs are rounded together.
template <typename W>
struct Kind;

template <>
struct Kind<float> {
  typedef float Input;
  typedef Vec Sum;
  static constexpr int kInputs = 1, kPart = 128;
  static Sum begin(const float* sums, const Rounding*) { return load(sums); }
  static Vec line(const float* p) { return load(p); }
  static Sum add(Sum sum, Input x, Vec w) { return sum + all(x) * w; }
  static void end(float* sums, Sum sum, const Rounding*) { store(sums, sum); }
};

static inline void add_scaled(float* sums, Ints sum, const Rounding* x) {
  store(sums, load(sums) + __builtin_convertvector(sum, Vec) * x->scale);
}

// Four neighbouring inputs, 16 bits each: the first and the third in one number, the second and the fourth in the next. Sums of
// a part are exact: 4 · 128 · 128 · 32,639 < 2^31.
struct Inputs16 {
  int32_t first, second;
};
// Of kLanes columns, four weights each, of 16 bits, in the same order.
struct Weights16 {
  Ints first, second;
};

template <>
struct Kind<int8_t> {
  typedef Inputs16 Input;
  typedef int16_t Integer;
  typedef Ints Sum;
  static constexpr int kInputs = 4, kPart = 128, kExcess = 0, kMost = 127 * 256 + 127;  // both its bytes have a sign
  static Sum begin(const float*, const Rounding*) { return Sum{}; }
  static Weights16 line(const int8_t* p) {
    const Shorts w = (Shorts)*reinterpret_cast<const Lines*>(p);
    return {(Ints)(w << 8 >> 8), (Ints)(w >> 8)};
  }
  static Sum add(Sum sum, Input x, Weights16 w) { return add(add(sum, x.first, w.first), x.second, w.second); }
  static Sum add(Sum sum, int32_t x, Ints w) {
#if defined(__AVX512VNNI__)
    return (Sum)_mm512_dpwssd_epi32((__m512i)sum, _mm512_set1_epi32(x), (__m512i)w);
#elif defined(__AVX512BW__)
    return sum + (Sum)_mm512_madd_epi16(_mm512_set1_epi32(x), (__m512i)w);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return sum + (Sum)_mm256_madd_epi16(_mm256_set1_epi32(x), (__m256i)w);
#else
    return sum + (w >> 16) * (x >> 16) + (w << 16 >> 16) * (int32_t)(int16_t)x;
#endif
  }
  static void end(float* sums, Sum sum, const Rounding* x) { add_scaled(sums, sum, x); }
};

// A weight that meets inputs of 8 bits, −127 to 127, four neighbouring ones in one number.
struct Quad {
  int8_t weight;
};

template <>
struct Kind<Quad> {
  typedef int32_t Input;
  typedef int8_t Integer;
  typedef Ints Sum;
  static constexpr int kInputs = 4, kPart = 128, kMost = 127;
  static Sum begin(const float*, const Rounding* x) { return Sum{} + x->start; }
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512BW__))
  // These multiply bytes without a sign with bytes that have one: weights + 128 with inputs, of whose sum 128-fold the sums of
  // products are therefore too great. So they begin with its negative.
  static constexpr int kExcess = 128;
#else
  static constexpr int kExcess = 0;
#endif
  static Ints line(const Quad* p) { return *reinterpret_cast<const Lines*>(p) ^ (int32_t)(kExcess * 0x01010101u); }
  static Sum add(Sum sum, Input x, Ints w) {
#if defined(__AVX512VNNI__)
    return (Sum)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX512BW__)
    // |w| · (x with w's sign): two such products side by side have at most 2 · 128 · 127 < 2^15.
    const __m512i u = (__m512i)w, v = _mm512_set1_epi32(x), none = _mm512_setzero_si512();
    const __m512i two = _mm512_maddubs_epi16(_mm512_abs_epi8(u), _mm512_mask_sub_epi8(v, _mm512_movepi8_mask(u), none, v));
    return sum + (Sum)_mm512_madd_epi16(two, _mm512_set1_epi16(1));
#elif defined(__AVXVNNI__)
    return (Sum)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, _mm256_set1_epi32(x));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i u = (__m256i)w, two = _mm256_maddubs_epi16(_mm256_abs_epi8(u), _mm256_sign_epi8(_mm256_set1_epi32(x), u));
    return sum + (Sum)_mm256_madd_epi16(two, _mm256_set1_epi16(1));
#else
    for (int shift = 0; shift < 32; shift += 8) sum += (w << (24 - shift) >> 24) * (int32_t)(int8_t)(x >> shift);
    return sum;
#endif
  }
  static void end(float* sums, Sum sum, const Rounding* x) { add_scaled(sums, sum, x); }
};

template <typename W>
constexpr int kLine = kPanel * Kind<W>::kInputs;  // weights in a line of a panel

// Of rows' groups of 16 columns, their panels: the greatest, which of them it is, the first of equal ones, and
// Σ exp(column − greatest). Where a column is not a number, the second is −1. Of up to kLanes rows at a time all
// panels lie one after the other: threads, which have panels of their own, seldom write the same lines.
struct Peaks {
  float *greatest, *sums;
  int32_t* columns;
  Peaks at(int64_t i) const { return {greatest + i, sums + i, columns + i}; }
};

// y [rows[i]] = x [i] · w, scaled, for i < M; or of each panel of it the peak. Of int8 weights x has been rounded, in
// parts of kPart lines. With `values` heads of `apart` columns lie `length` rows apart, those of the first half of the columns in
// y.
template <typename W>
struct Product {
  const typename Kind<W>::Input* x;
  const Rounding* roundings;  // [M, parts], or none
  const int32_t* rows;
  int64_t M, lines, parts;
  const W* w;
  const float *scales, *bias, *residual;  // [F], [F], [.., F], or none
  float *y, *values;
  int64_t F, apart, length;
  Peaks peaks;  // [⌈M / kLanes⌉, panels, kLanes or M], in the place of y
  bool summed;
  float cap;  // 0: none
  bool tiled;

  // By heads, where a column of row 0 lies.
  float* at(int64_t column) const {
    const int64_t half = F / 2, own = column < half ? column : column - half;
    return (column < half ? y : values) + own / apart * length * apart + own % apart;
  }
};

// Lines begin .. end - 1 of a few panels, which lie `apart` values apart, for one block of rows.
template <typename W>
struct Panels {
  const W* w;
  int64_t apart;
  int lines, begin, end;
  int ahead;        // lines from the one that is read to the one that is asked for
  int turn, turns;  // of the blocks that read the same lines each asks for its share of the next ones
};

// Rows of inputs, `lines` long, and how these lines of each were rounded, which lies `apart` apart.
template <typename W>
struct Inputs {
  const typename Kind<W>::Input* x;
  const Rounding* roundings;
  int64_t lines, apart;
};

// sums [M, P panels] += x · w.
template <int M, int P, typename W>
static __attribute__((noinline)) void block(const Inputs<W>& x, const Panels<W>& w, float* sums) {
  typedef Kind<W> Of;
  typename Of::Sum s[M][P][kParts];
#pragma GCC unroll 64
  for (int i = 0; i < M; i++)
#pragma GCC unroll 64
    for (int p = 0; p < P; p++)
#pragma GCC unroll 4
      for (int q = 0; q < kParts; q++) s[i][p][q] = Of::begin(sums + (i * P + p) * kPanel + q * kLanes, x.roundings + i * x.apart);
  // Rows by a few pointers: one for each would take more registers than there are.
  constexpr int kApart = 5, kPointers = (M + kApart - 1) / kApart;
  const typename Of::Input* from[kPointers];
#pragma GCC unroll 64
  for (int j = 0; j < kPointers; j++) {
    from[j] = x.x + j * kApart * x.lines + w.begin;
    if (kPointers > 1) asm("" : "+r"(from[j]));
  }
  constexpr int kEach = 64 / (kLine<W> * sizeof(W));  // lines in 64 bytes
  const W* line = w.w + (int64_t)w.begin * kLine<W>;
  for (int k = w.begin, turn = w.turn; k < w.end;) {
    // From some line on what is asked for lies past the end of these panels, in the next ones.
    const bool inside = k + w.ahead < w.lines;
    const int end = inside && w.lines - w.ahead < w.end ? w.lines - w.ahead : w.end;
    const int64_t to = (int64_t)w.ahead * kLine<W> + (inside ? 0 : (P - 1) * w.apart);
    for (; k < end; k++, line += kLine<W>) {
      if (k % kEach == 0 && !turn--) {
        turn = w.turns - 1;
#pragma GCC unroll 64
        for (int p = 0; p < P; p++) __builtin_prefetch(line + to + p * w.apart, 0, 3);
      }
      decltype(Of::line(w.w)) u[P][kParts];
#pragma GCC unroll 64
      for (int p = 0; p < P; p++)
#pragma GCC unroll 4
        for (int q = 0; q < kParts; q++) u[p][q] = Of::line(line + p * w.apart + q * kLanes * Of::kInputs);
#pragma GCC unroll 64
      for (int i = 0; i < M; i++) {
        const typename Of::Input v = from[i / kApart][i % kApart * x.lines];
#pragma GCC unroll 64
        for (int p = 0; p < P; p++)
#pragma GCC unroll 4
          for (int q = 0; q < kParts; q++) s[i][p][q] = Of::add(s[i][p][q], v, u[p][q]);
      }
#pragma GCC unroll 64
      for (int j = 0; j < kPointers; j++) from[j]++;
    }
  }
#pragma GCC unroll 64
  for (int i = 0; i < M; i++)
#pragma GCC unroll 64
    for (int p = 0; p < P; p++)
#pragma GCC unroll 4
      for (int q = 0; q < kParts; q++)
        Of::end(sums + (i * P + p) * kPanel + q * kLanes, s[i][p][q], x.roundings + i * x.apart);
}

// The block of m rows, kLeast <= m < kLeast + the length of the sequence.
template <int P, int kLeast, typename W, int... M>
static void block_of(int m, const Inputs<W>& x, const Panels<W>& w, float* sums, std::integer_sequence<int, M...>) {
  static constexpr void (*blocks[])(const Inputs<W>&, const Panels<W>&, float*) = {block<kLeast + M, P, W>...};
  blocks[m - kLeast](x, w, sums);
}

// Sums of m rows, `width` apart, to `count` columns from `begin` on.
template <bool kByHeads, typename W>
static __attribute__((noinline)) void finish(const Product<W>& of, const float* sums, int width, int m, const int32_t* rows,
                                             int64_t begin, int64_t count) {
  const float *scales = of.scales, *biases = of.bias, *residual = kByHeads ? nullptr : of.residual, cap = kByHeads ? 0 : of.cap;
  const int64_t apart = of.apart;
  for (int64_t j = 0; j < count; j += kLanes) {
    const int64_t n = count - j, column = begin + j;
    const Vec scale = scales ? load(scales + column, n) : Vec{}, bias = biases ? load(biases + column, n) : Vec{};
    float* to = kByHeads ? of.at(column) : of.y + column;
    for (int i = 0; i < m; i++) {
      const int64_t at = rows[i] * apart;
      Vec v = load(sums + i * width + j);
      if (scales) v *= scale;
      if (biases) v += bias;
      if (cap > 0) v = capped(v, cap);
      if (residual) v += load(residual + at + column, n);
      if (!kByHeads || apart % kLanes == 0) store(to + at, v, n);
      else
        for (int q = 0; q < kLanes && q < n; q++) of.at(column + q)[at] = v[q];
    }
  }
}

template <int... I>
constexpr Vec counted(std::integer_sequence<int, I...>) {
  return Vec{(float)I...};
}
constexpr Vec kFirst = counted(std::make_integer_sequence<int, kLanes>());  // 0, 1, ..
// The first n of them, if that is less; −∞ in the place of the others.
static inline Vec only(Vec v, int64_t n) { return n >= kLanes ? v : kFirst < (float)n ? v : all(-INFINITY); }

typedef Vec Group[kParts];  // 16 columns

// The peaks of up to kLanes groups. Not inlined, and so with the same bits wherever it is called: a compiler may join
// multiplications and additions here and not there.
static __attribute__((noinline)) void find_peaks(const Group* groups, int count, bool summed, const Peaks& to) {
  Vec own[kLanes];
  for (int g = 0; g < kLanes; g++) own[g] = all(-INFINITY);
  for (int g = 0; g < count; g++)
    for (int q = 0; q < kParts; q++) own[g] = groups[g][q] > own[g] ? groups[g][q] : own[g];
  store(to.greatest, some_folded(own, count, [](Vec a, Vec b) { return b > a ? b : a; }));
  for (int g = 0; g < count; g++) {
    const Vec greatest = all(to.greatest[g]);
    Ints wrong = {};
    own[g] = all(kPanel);
    for (int q = kParts - 1; q >= 0; q--) {
      own[g] = groups[g][q] == greatest ? kFirst + (float)(q * kLanes) : own[g];
      wrong |= groups[g][q] != groups[g][q];
    }
    own[g] = wrong ? all(-1.0f) : own[g];
  }
  const Vec first = some_folded(own, count, [](Vec a, Vec b) { return b < a ? b : a; });
  *reinterpret_cast<Lines*>(to.columns) = __builtin_convertvector(first, Ints);
  if (!summed) return;
  for (int g = 0; g < count; g++) {
    const Vec most = all(to.greatest[g] > -INFINITY ? to.greatest[g] : 0.0f);
    own[g] = Vec{};
    for (int q = 0; q < kParts; q++) own[g] += exp_of(groups[g][q] - most);
  }
  store(to.sums, some_folded(own, count, [](Vec a, Vec b) { return a + b; }));
}

// Of up to kLanes rows, `apart` apart, the peaks of all columns, with log Σ exp(column − greatest) in the place of the sum. It
// reads as far as of kLanes. Not inlined, as `find_peaks`.
static __attribute__((noinline)) void join_peaks(const Peaks& of, int64_t apart, int64_t panels, bool summed, const Peaks& to) {
  Vec greatest = load(of.greatest);
  Ints wrong = {}, column = *reinterpret_cast<Lines*>(of.columns);
  for (int64_t p = 0; p < panels; p++) {
    const Vec found = load(of.greatest + p * apart);
    const Ints more = found > greatest, columns = *reinterpret_cast<Lines*>(of.columns + p * apart);
    greatest = more ? found : greatest;
    column = more ? columns + (int32_t)(p * kPanel) : column;
    wrong |= columns < 0;
  }
  Doubles total = {};
  for (int64_t p = 0; summed && p < panels; p++) {
    const Vec own = exp_of(load(of.greatest + p * apart) - greatest) * load(of.sums + p * apart);
    total += __builtin_convertvector(own, Doubles);
  }
  store(to.greatest, greatest);
  *reinterpret_cast<Lines*>(to.columns) = column | wrong;
  for (int i = 0; summed && i < apart; i++) to.sums[i] = std::log(total[i]);
}

// Sums of so many rows from `first` on, `side` panels each, to the columns of `count` panels from this one on, or their peaks.
template <typename W>
static __attribute__((noinline)) void end_panels(const Product<W>& of, const float* sums, int side, int64_t panel, int64_t count, int64_t first, int rows) {
  const int64_t begin = panel * kPanel, left = of.F - begin, own = count * kPanel < left ? count * kPanel : left;
  if (of.values) return finish<true>(of, sums, side * kPanel, rows, of.rows + first, begin, own);
  if (of.y) return finish<false>(of, sums, side * kPanel, rows, of.rows + first, begin, own);
  const float *scales = of.scales, *biases = of.bias, cap = of.cap;
  const int64_t panels = (of.F + kPanel - 1) / kPanel, apart = of.M < kLanes ? of.M : kLanes;
  const Peaks peaks = of.peaks;
  Group groups[kLanes];
  float greatest[kLanes], exponentials[kLanes] = {};
  int32_t columns[kLanes];
  int64_t places[kLanes];
  int filled = 0;
  const auto flush = [&] {
    find_peaks(groups, filled, of.summed, {greatest, exponentials, columns});
    for (int g = 0; g < filled; g++) {
      const Peaks to = peaks.at(places[g]);
      *to.greatest = greatest[g], *to.sums = exponentials[g], *to.columns = columns[g];
    }
    filled = 0;
  };
  for (int64_t j = 0; j < own; j += kPanel) {
    Vec scale[kParts], bias[kParts];
    for (int q = 0; q < kParts; q++) {
      const int64_t k = j + q * kLanes, n = own > k ? own - k : 0;
      scale[q] = scales ? load(scales + begin + k, n) : all(1.0f);
      bias[q] = biases ? load(biases + begin + k, n) : Vec{};
    }
    for (int i = 0; i < rows; i++) {
      for (int q = 0; q < kParts; q++) {
        const int64_t k = j + q * kLanes;
        Vec v = load(sums + i * side * kPanel + k) * scale[q];
        if (biases) v += bias[q];
        if (cap > 0) v = capped(v, cap);
        groups[filled][q] = only(v, own - k);
      }
      const int64_t row = first + i;
      places[filled] = (row / kLanes * panels + panel + j / kPanel) * apart + row % kLanes;
      if (++filled == kLanes) flush();
    }
  }
  if (filled) flush();
}

// P panels from this one on for all rows, in blocks of kLeast to kMost; where fewer are left one takes the place of all P.
template <int P, int kLeast, int kMost, typename W>
static void columns(const Product<W>& of, int64_t panel, bool whole) {
  const int64_t apart = of.lines * kLine<W>;
  Panels<W> w{of.w + panel * apart, whole ? apart : 0, (int)of.lines, 0, 0, 0, 0, 0};
  float sums[kGroup * P * kPanel];
  int64_t first = 0;
  for (int64_t groups = (of.M + kGroup - 1) / kGroup; groups > 0; groups--) {
    const int rows = (of.M - first + groups - 1) / groups;
    const int part = rows <= kMost && !of.roundings ? of.lines : Kind<W>::kPart;
    w.turns = (rows + kMost - 1) / kMost;
    w.ahead = w.turns == 1 ? kAhead / P : Kind<W>::kPart;
    std::memset(sums, 0, sizeof(float) * rows * P * kPanel);
    for (w.begin = 0; w.begin < of.lines; w.begin = w.end) {
      w.end = w.begin + part < of.lines ? w.begin + part : of.lines;
      int row = 0;
      for (w.turn = 0; w.turn < w.turns; w.turn++) {
        const int m = (rows - row + w.turns - w.turn - 1) / (w.turns - w.turn);
        const Rounding* roundings = of.roundings ? of.roundings + (first + row) * of.parts + w.begin / part : nullptr;
        block_of<P, kLeast, W>(m, {of.x + (first + row) * of.lines, roundings, of.lines, of.parts}, w, sums + row * P * kPanel,
                               std::make_integer_sequence<int, kMost - kLeast + 1>());
        row += m;
      }
    }
    end_panels(of, sums, P, panel, whole ? P : 1, first, rows);
    first += rows;
  }
}

template <int P, int kLeast, int kMost, typename W>
static void panels_of(const Product<W>& of, int64_t first, int64_t last) {
  for (; last - first >= P; first += P) columns<P, kLeast, kMost>(of, first, true);
  for (; first < last; first++) columns<P, kLeast, kMost>(of, first, false);
}

#ifdef SPECDEC_TILES
// Of one tile of inputs or two and two of weights, `count` of each, the products; those of the inputs and of the weights lie so far
// apart. The next weights are asked for, which matters where they come from memory and not from a cache.
template <bool kTwo>
static inline void multiply_tiles(const int8_t* x, int64_t apart, const int8_t* w, int64_t next, int count, int32_t* to) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int k = 0; k < count; k++, x += kTile, w += kTile) {
    for (int line = 0; line < kTileRows; line++) {
      __builtin_prefetch(w + kTile + line * kTileBytes);
      __builtin_prefetch(w + next + kTile + line * kTileBytes);
    }
    _tile_loadd(4, x, kTileBytes);
    _tile_loadd(6, w, kTileBytes);
    _tile_loadd(7, w + next, kTileBytes);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    if (!kTwo) continue;
    _tile_loadd(5, x + apart, kTileBytes);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_stored(0, to, kTileBytes);
  _tile_stored(1, to + kSums, kTileBytes);
  if (!kTwo) return;
  _tile_stored(2, to + 2 * kSums, kTileBytes);
  _tile_stored(3, to + 3 * kSums, kTileBytes);
}

// sums [rows, 2 panels] = or += what `multiply_tiles` found.
template <int kBytes>
static inline void add_found(const int32_t* found, const Rounding* roundings, int64_t apart, int rows, bool begins, float* sums) {
  for (int i = 0; i < rows; i++, roundings += apart) {
    const int byte = i * kBytes;
    for (int p = 0; p < kTilePanels; p++, sums += kPanel) {
      const auto* from = (const Ints*)(found + (byte / kTileRows * kTilePanels + p) * kSums + byte % kTileRows * kPanel);
      if (begins) store(sums, Vec{});
      add_scaled(sums, kBytes == 2 ? (from[0] << 8) + from[1] : from[0], roundings);
    }
  }
}

// Panels first .. last - 1, two at a time, with the bytes of x in tiles: of 8 bits 32 rows at a time, of 16 bits, whose upper and
// lower bytes are rows, 16. The sums of products are exact, and so the bits are those of `columns`. What a block has found is read
// after the next one's products, which would wait for it otherwise.
template <typename W>
static __attribute__((noinline)) void tiled(const Product<W>& of, int64_t first, int64_t last) {
  constexpr int kBytes = sizeof(typename Kind<W>::Integer), kRows = 2 * kTileRows / kBytes, kMost = Kind<W>::kPart / kTileRows;
  const Tiles tiles(of.M * kBytes);
  const int64_t apart = of.lines * kTileBytes;  // bytes of a panel, and of 16 rows of 8 bits
  alignas(64) int32_t found[2][4 * kSums];
  alignas(64) float sums[kRows * kTilePanels * kPanel];
  int64_t panel = first, row = 0, part = 0;
  const auto end = [&](const int32_t* from) {
    const int rows = of.M - row < kRows ? of.M - row : kRows;
    add_found<kBytes>(from, of.roundings + row * of.parts + part, of.parts, rows, !part, sums);
    if (part == of.parts - 1) end_panels(of, sums, kTilePanels, panel, last - panel < kTilePanels ? 1 : kTilePanels, row, rows);
  };
  bool turn = false, some = false;
  for (int64_t p = first; p < last; p += kTilePanels)
    for (int64_t r = 0; r < of.M; r += kRows)
      for (int64_t k = 0; k < of.parts; k++, turn = !turn, some = true) {
        const int8_t* w = (const int8_t*)of.w + p * apart + k * kMost * kTile;
        const int8_t* x = (const int8_t*)of.x + r * kBytes / kTileRows * apart + k * kMost * kTile;
        const int64_t left = of.lines / kTileRows - k * kMost, next = p + 1 < last ? apart : 0;
        const int count = left < kMost ? left : kMost;
        if ((of.M - r) * kBytes > kTileRows) multiply_tiles<true>(x, apart, w, next, count, found[turn]);
        else multiply_tiles<false>(x, apart, w, next, count, found[turn]);
        if (some) end(found[!turn]);
        panel = p, row = r, part = k;
      }
  end(found[!turn]);
}
#endif

template <typename W>
static void product(ffi::ThreadPool& pool, const Product<W>& of) {
  constexpr int kFour = rows_for(4), kTwo = rows_for(2), kMost = rows_for(kWide);
  // Many rows are cut into blocks that are about alike.
  constexpr int kHalf = (kMost + 1) / 2, kLeast = kWide == 4 ? 1 : kTwo < kHalf ? kTwo + 1 : kHalf;
  const int64_t panels = (of.F + kPanel - 1) / kPanel, bytes = of.lines * kLine<W> * sizeof(W);
  const int side = of.tiled ? kTilePanels : of.M <= kFour ? 4 : of.M <= kTwo ? 2 : kWide;
  const auto part = [=](int64_t first, int64_t last) {
    first *= side, last = last * side < panels ? last * side : panels;
#ifdef SPECDEC_TILES
    if constexpr (Kind<W>::kInputs > 1)
      if (of.tiled) return tiled(of, first, last);
#endif
    if constexpr (kFour > 0)
      if (of.M <= kFour) return panels_of<4, 1, kFour>(of, first, last);
    if (of.M <= kTwo) return panels_of<2, kFour + 1, kTwo>(of, first, last);
    panels_of<kWide, kLeast, kMost>(of, first, last);
  };
  const int64_t groups = (panels + side - 1) / side;
  const int64_t weights = panels * kPanel * of.lines * Kind<W>::kInputs;
  const int64_t sums = weights * of.M / (of.tiled ? 16 : std::is_same_v<W, int8_t> ? 2 : 4);
  const int64_t cost = panels * bytes > sums ? panels * bytes : sums;  // bytes, or what the arithmetic takes meanwhile
  in_parallel(pool, groups, (128 << 10) / (side * bytes + 1) + 1, cost / (64 << 10), part);
}

static ffi::Error unfit(const char* what) { return ffi::Error::InvalidArgument(std::string("specdec_jax: ") + what); }

template <typename B>
static bool has(const B& buffer, int64_t elements) { return (int64_t)buffer.element_count() == elements; }

// The same, or none.
template <typename B>
static bool may_have(const B& buffer, int64_t elements) { return !buffer.element_count() || has(buffer, elements); }

template <typename D>
static int64_t count(const D& dimensions, size_t first, size_t last) {
  int64_t n = 1;
  for (size_t i = first; i < last; i++) n *= dimensions[i];
  return n;
}

// Memory of the calling thread, which keeps what it held when it grows no further.
template <typename T>
static T* resized(std::vector<T>& own, int64_t size) {
  if ((int64_t)own.size() < size) own.resize(size);
  return own.data();
}

// Of kLanes integers those with fewer bits.
static inline void narrowed(Ints integers, int16_t* to) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)integers));
#elif defined(__AVX2__)
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)integers, (__m256i)integers), 0x08);
  _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(packed));
#else
  for (int i = 0; i < kLanes; i++) to[i] = integers[i];
#endif
}
static inline void narrowed(Ints integers, int8_t* to) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)integers));
#else
  for (int i = 0; i < kLanes; i++) to[i] = integers[i];
#endif
}

// Each four numbers in the order of `Inputs16`.
template <int... I>
static inline Ints paired(Ints v, std::integer_sequence<int, I...>) {
  return Ints{v[I % 4 == 1 ? I + 1 : I % 4 == 2 ? I - 1 : I]...};
}

// Rounded inputs as `columns` reads them.
template <typename W>
struct InLine {
  typename Kind<W>::Integer* to;
  void operator()(int64_t k, Ints integers, int64_t left) const {
    if constexpr (sizeof(*to) == 2) integers = paired(integers, std::make_integer_sequence<int, kLanes>());
    if (left >= kLanes) return narrowed(integers, to + k);
    typename Kind<W>::Integer own[kLanes];
    narrowed(integers, own);
    std::memcpy(to + k, own, sizeof(*to) * left);
  }
};

#ifdef SPECDEC_TILES
// The same as `tiled` reads them, in whole vectors.
template <typename W>
struct InTiles {
  int8_t* to;
  void operator()(int64_t k, Ints integers, int64_t) const {
    int8_t* at = to + k / kTileBytes * kTile + k % kTileBytes;
    if constexpr (sizeof(typename Kind<W>::Integer) == 2) narrowed((integers + 128) >> 8, at), at += kTileBytes;
    narrowed(integers, at);
  }
};
#endif

// Rounds a row of inputs, in parts; a part's scale is none where an input is not finite.
template <typename W, typename To>
static __attribute__((noinline)) void rounded(const float* x, int64_t K, Rounding* roundings, To to) {
  constexpr int64_t kInputs = Kind<W>::kInputs, kEach = Kind<W>::kPart * kInputs;
  constexpr float kMost = Kind<W>::kMost;
  for (int64_t first = 0; first < K; first += kEach) {
    const int64_t end = K - first < kEach ? K : first + kEach;
    Ints most = {};  // the bits of magnitudes, which have the order of the magnitudes
    for (int64_t k = first; k < end; k += kLanes) {
      const Ints size = (Ints)load(x + k, end - k) & 0x7fffffff;
      most = size > most ? size : most;
    }
    const int32_t bits = greatest_of(most);
    const bool finite = bits < 0x7f800000;
    float greatest;
    std::memcpy(&greatest, &bits, sizeof(bits));
    // What is as small as this is as good as 0, and its reciprocal would not be finite.
    const float inverse = finite && greatest > 1e-30f ? kMost / greatest : 0.0f;
    Ints total = {};
    for (int64_t k = first; k < end; k += kLanes) {
      const Vec v = finite ? load(x + k, end - k) : Vec{};
      const Ints integers = (Ints)(v * inverse + all(kShift)) - 0x4b400000;
      total += integers;
      to(k, integers, (end - k + kInputs - 1) / kInputs * kInputs);
    }
    *roundings++ = {finite ? greatest / kMost : NAN, Kind<W>::kExcess * -sum_of(total)};
  }
}

// What is made of a row before it is multiplied: `panels.Before`.
enum : int64_t { kNothing, kRootMeanSquare, kMeanAndVariance, kActivation, kGate };
enum : int64_t { kLinear, kRelu, kGelu, kSilu, kExactGelu };

struct Before {
  int64_t kind, first, second;  // activations
  const float *scale, *bias;    // of a norm, [K]
};

// 1 / (1 + e^-x).
static inline Vec sigmoid(Vec x) {
  const Vec e = exp_of((Vec)((Ints)x | (int32_t)0x80000000));
  return (x < 0 ? e : all(1.0f)) / (1.0f + e);
}

// erf x to some 2e-7: a quotient of polynomials, as in Eigen and XLA; beyond 4 it is 1.
static inline Vec erf_of(Vec x) {
  x = x > 4.0f ? all(4.0f) : x < -4.0f ? all(-4.0f) : x;
  const Vec y = x * x;
  Vec over = all(-2.72614225801306e-10f);
  for (float c : {2.77068142495902e-08f, -2.10102402082508e-06f, -5.69250639462346e-05f, -7.34990630326855e-04f,
                  -2.95459980854025e-03f, -1.60960333262415e-02f})
    over = over * y + c;
  Vec under = all(-1.45660718464996e-05f);
  for (float c : {-2.13374055278905e-04f, -1.68282697438203e-03f, -7.37332916720468e-03f, -1.42647390514189e-02f})
    under = under * y + c;
  return x * over / under;
}

static inline Vec activated(int64_t activation, Vec x) {
  switch (activation) {
    case kExactGelu: return 0.5f * x * (1.0f + erf_of(x * 0.70710678118f));
    case kRelu: return x < 0 ? Vec{} : x;
    case kGelu: return x * sigmoid(1.5957691216f * (x + 0.044715f * (x * x * x)));  // 2 · √(2 / π)
    case kSilu: return x * sigmoid(x);
    default: return x;
  }
}

// K numbers made of a row, which for a gate has 2 K.
static __attribute__((noinline)) void prepared(const Before& before, const float* x, int64_t K, float* to) {
  if (before.kind == kActivation || before.kind == kGate) {
    for (int64_t k = 0; k < K; k += kLanes) {
      Vec v = activated(before.first, load(x + k, K - k));
      if (before.kind == kGate) v *= activated(before.second, load(x + K + k, K - k));
      store(to + k, v, K - k);
    }
    return;
  }
  const bool centred = before.kind == kMeanAndVariance;
  Vec sums = {}, squares = {};
  for (int64_t k = 0; centred && k < K; k += kLanes) sums += load(x + k, K - k);
  const float mean = centred ? sum_of(sums) / K : 0.0f;
  for (int64_t k = 0; centred && k < K; k += kLanes) store(to + k, load(x + k, K - k) - mean, K - k);
  const float* from = centred ? to : x;
  for (int64_t k = 0; k < K; k += kLanes) squares += load(from + k, K - k) * load(from + k, K - k);
  const float factor = 1.0f / std::sqrt(sum_of(squares) / K + (centred ? 1e-5f : 1e-6f));
  for (int64_t k = 0; k < K; k += kLanes) {
    Vec v = load(from + k, K - k) * factor * load(before.scale + k, K - k);
    if (centred) v += load(before.bias + k, K - k);
    store(to + k, v, K - k);
  }
}

using Floats = ffi::Buffer<ffi::F32>;
using Integers = ffi::Buffer<ffi::S32>;
using Flags = ffi::Buffer<ffi::PRED>;
template <ffi::DataType kType>
using Out = ffi::ResultBuffer<kType>;

static const float* or_none(const Floats& x) { return x.element_count() ? x.typed_data() : nullptr; }

// Where the results of `multiply` go: products, or the peaks of their rows.
struct Results {
  float* y;
  const float *bias, *residual;
  int32_t* tokens;
  float* log_probs;
  bool summed, clear;
  float cap;
  // By heads: where values lie, of rows of `length` positions; heads have so many features.
  float* values = nullptr;
  int64_t length = 0, features = 0;
};

// Multiplies the rows of x that count, what `before` makes of them. `live`: rows that count, of no elements where all do; the
// results of the others are 0, or with `clear` false whatever lay there.
template <ffi::DataType kType, typename W>
static ffi::Error multiply(ffi::ThreadPool pool, const Floats& x, const ffi::Buffer<kType>& w, const Floats& scales, int64_t F,
                           const Flags& live, const Before& before, const Results& to) {
  typedef typename Kind<W>::Input Input;
  constexpr int kInputs = Kind<W>::kInputs;
  const auto xs = x.dimensions(), ws = w.dimensions();
  if (!xs.size()) return unfit("product: expected rows [.., K]");
  const int64_t width = xs[xs.size() - 1], K = before.kind == kGate ? width / 2 : width, all = count(xs, 0, xs.size() - 1);
  const int64_t panels = (F + kPanel - 1) / kPanel, lines = (K + kInputs - 1) / kInputs;
  const int64_t parts = kInputs > 1 ? (lines + Kind<W>::kPart - 1) / Kind<W>::kPart : 0;
  const bool some = live.element_count() > 0;
  if (F < 0 || ws.size() < 3 || ws[0] != panels || ws[1] != lines || !has(w, panels * lines * kLine<W>) ||
      !may_have(live, all) || !has(scales, kInputs > 1 ? F : 0) || K > INT32_MAX || all > INT32_MAX || F > INT32_MAX)
    return unfit("product: shapes do not fit");
  static thread_local std::vector<int32_t> own_rows, own_places;
  static thread_local std::vector<Input> own_x;
  static thread_local std::vector<Rounding> own_roundings;
  static thread_local std::vector<float> own_peaks;
  static thread_local std::vector<int32_t> own_columns;
  int32_t *rows = resized(own_rows, all), *places = to.values ? resized(own_places, all) : rows;
  const int64_t stride = to.values ? to.features : F, heads = to.values ? F / 2 / stride : 1;
  int64_t M = 0;
  for (int64_t row = 0; row < all; row++) {
    const int64_t place = to.values ? row / to.length * heads * to.length + row % to.length : row;
    if (!some || live.typed_data()[row]) rows[M] = row, places[M++] = place;
    else if (!to.y) to.tokens[row] = 0, to.log_probs[row] = 0;
    else
      for (int64_t h = 0; to.clear && h < heads; h++)
        for (float* y : {to.y, to.values})
          if (y) std::memset(y + (place + h * to.length) * stride, 0, sizeof(float) * stride);
  }
  if (!M || !F) return ffi::Error::Success();
  const float* given = x.typed_data();
  const bool tiled = kInputs > 1 && M >= kTiledFrom && K > 0 && K % kTileBytes == 0 && may_use_tiles();
  Product<W> of{(const Input*)given, nullptr, places, M, lines, parts, (const W*)w.typed_data(), or_none(scales), to.bias,
                to.residual, to.y, to.values, F, stride, to.length, {}, to.summed, to.cap, tiled};
  if (kInputs > 1 || M < all || before.kind != kNothing) {
    constexpr int64_t kLineInputs = kTileBytes / sizeof(Input);
    Input* into = resized(own_x, (M + kTileRows - 1) / kTileRows * kTileRows * lines + kLineInputs);
    into += -(uintptr_t)into / sizeof(Input) % kLineInputs;  // rows of tiles are lines of the cache
    Rounding* roundings = resized(own_roundings, M * parts);
    const bool activates = before.kind == kActivation || before.kind == kGate;  // which takes several times as long as a norm
    in_parallel(pool, M, 1 + (1 << 13) / (K + 1), M * K / (activates ? 1 << 11 : 1 << 14), [=](int64_t first, int64_t last) {
      static thread_local std::vector<float> own;
      for (int64_t i = first; i < last; i++) {
        const float* row = given + rows[i] * width;
        float* made = kInputs > 1 ? before.kind == kNothing ? nullptr : resized(own, K) : (float*)(into + i * lines);
        if (before.kind != kNothing) prepared(before, row, K, made);
        else if (kInputs == 1) std::memcpy(made, row, sizeof(float) * K);
        if constexpr (kInputs > 1) {
          typedef typename Kind<W>::Integer Integer;
#ifdef SPECDEC_TILES
          const int64_t byte = i * sizeof(Integer);
          if (of.tiled) {
            int8_t* to = (int8_t*)into + byte / kTileRows * kTileRows * K + byte % kTileRows * kTileBytes;
            rounded<W>(made ? made : row, K, roundings + i * parts, InTiles<W>{to});
            continue;
          }
#endif
          rounded<W>(made ? made : row, K, roundings + i * parts, InLine<W>{(Integer*)(into + i * lines)});
        }
      }
    });
    of.x = into, of.roundings = roundings;
  }
  if (to.y) {
    product<W>(pool, of);
    return ffi::Error::Success();
  }
  const int64_t blocks = (M + kLanes - 1) / kLanes, apart = M < kLanes ? M : kLanes;
  const int64_t block_size = panels * apart, size = blocks * block_size + kLanes;
  of.peaks = {resized(own_peaks, 2 * size), own_peaks.data() + size, resized(own_columns, size)};
  product<W>(pool, of);
  in_parallel(pool, blocks, 1, blocks * panels / (1 << 9), [=](int64_t first, int64_t last) {
    float greatest[kLanes], log_sums[kLanes] = {};
    int32_t columns[kLanes];
    for (int64_t block = first; block < last; block++) {
      join_peaks(of.peaks.at(block * block_size), apart, panels, to.summed, {greatest, log_sums, columns});
      for (int64_t i = 0; i < kLanes && block * kLanes + i < M; i++) {
        const int32_t row = rows[block * kLanes + i];
        to.tokens[row] = columns[i];
        to.log_probs[row] = columns[i] < 0 ? NAN : 0.0f - log_sums[i];
      }
    }
  });
  return ffi::Error::Success();
}

template <ffi::DataType kType, typename W>
static ffi::Error ProductOf(ffi::ThreadPool pool, Floats x, ffi::Buffer<kType> w, Floats scales, Flags live, Floats norm_scale,
                            Floats norm_bias, Floats bias, Floats residual, Out<ffi::F32> y, int64_t before, int64_t first,
                            int64_t second, bool clear, float cap) {
  const auto xs = x.dimensions(), ys = y->dimensions();
  const int64_t rows = xs.size() ? count(xs, 0, xs.size() - 1) : -1, F = ys.size() ? ys[ys.size() - 1] : -1;
  const bool normed = before == kRootMeanSquare || before == kMeanAndVariance;
  const int64_t K = xs.size() ? xs[xs.size() - 1] : -1;
  if (before < kNothing || before > kGate || first < kLinear || first > kExactGelu || second < kLinear ||
      second > kExactGelu)
    return unfit("product: expected a kind of norm or activation that is known");
  if (!has(*y, rows * F) || !may_have(bias, F) || !may_have(residual, rows * F) || !has(norm_scale, normed ? K : 0) ||
      !has(norm_bias, before == kMeanAndVariance ? K : 0))
    return unfit("product: shapes do not fit");
  return multiply<kType, W>(pool, x, w, scales, F, live, {before, first, second, or_none(norm_scale), or_none(norm_bias)},
                            {y->typed_data(), or_none(bias), or_none(residual), nullptr, nullptr, false, clear, cap});
}

// Of L positions of each row of x the keys [.., G, L, K] and the values, which the first and the second half of w give; 0 for the
// others.
template <ffi::DataType kType, typename W>
static ffi::Error KeysValuesOf(ffi::ThreadPool pool, Floats x, ffi::Buffer<kType> w, Floats scales, Flags live, Floats bias,
                               Out<ffi::F32> keys, Out<ffi::F32> values) {
  const auto xs = x.dimensions(), ks = keys->dimensions();
  if (xs.size() < 2 || ks.size() < 3) return unfit("keys, values: expected x [.., L, D] and keys [.., G, L, K]");
  const int64_t rows = count(xs, 0, xs.size() - 1), L = xs[xs.size() - 2], G = ks[ks.size() - 3], K = ks[ks.size() - 1];
  const int64_t F = 2 * G * K;
  if (K < 1 || ks[ks.size() - 2] != L || rows * G > INT32_MAX || !has(*keys, rows * G * K) || !has(*values, rows * G * K) || !may_have(bias, F))
    return unfit("keys, values: shapes do not fit");
  return multiply<kType, W>(pool, x, w, scales, F, live, {kNothing, kLinear, kLinear, nullptr, nullptr},
                            {keys->typed_data(), or_none(bias), nullptr, nullptr, nullptr, false, true, 0.0f, values->typed_data(), L, K});
}

// `summed`: with log-probabilities, which are 0 otherwise.
template <ffi::DataType kType, typename W>
static ffi::Error HeadOf(ffi::ThreadPool pool, Floats x, ffi::Buffer<kType> w, Floats scales, Flags live, Floats bias,
                         Out<ffi::S32> tokens, Out<ffi::F32> log_probs, int64_t columns, bool summed, float cap) {
  const auto xs = x.dimensions();
  const int64_t rows = xs.size() ? count(xs, 0, xs.size() - 1) : -1;
  if (columns < 1 || !has(*tokens, rows) || !has(*log_probs, rows) || !may_have(bias, columns))
    return unfit("head: shapes do not fit");
  return multiply<kType, W>(pool, x, w, scales, columns, live, {kNothing, kLinear, kLinear, nullptr, nullptr},
                            {nullptr, or_none(bias), nullptr, tokens->typed_data(), log_probs->typed_data(), summed, true, cap});
}

// What `before`, a norm, makes of the rows of x that are live; 0 for the others.
static ffi::Error Norm(ffi::ThreadPool pool, Floats x, Floats scale, Floats bias, Flags live, Out<ffi::F32> y, int64_t before) {
  const auto xs = x.dimensions();
  const int64_t K = xs.size() ? xs[xs.size() - 1] : 0, rows = xs.size() ? count(xs, 0, xs.size() - 1) : 0;
  const bool some = live.element_count() > 0, centred = before == kMeanAndVariance;
  if ((before != kRootMeanSquare && !centred) || !has(*y, rows * K) || !has(scale, K) || !has(bias, centred ? K : 0) ||
      !may_have(live, rows))
    return unfit("norm: shapes do not fit");
  const Before norm{before, 0, 0, scale.typed_data(), or_none(bias)};
  const float* from = x.typed_data();
  const bool* counts = live.typed_data();
  float* to = y->typed_data();
  in_parallel(pool, rows, 1 + (1 << 13) / (K + 1), rows * K / (1 << 14), [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      if (!some || counts[i]) prepared(norm, from + i * K, K, to + i * K);
      else std::memset(to + i * K, 0, sizeof(float) * K);
    }
  });
  return ffi::Error::Success();
}

// Of each row of x the greatest number and log Σ exp(x − greatest), in the order in which `HeadOf` adds; the log is 0 where no
// number is above −∞, and none where a number is none.
static ffi::Error LogSums(ffi::ThreadPool pool, Floats x, Out<ffi::F32> greatest, Out<ffi::F32> log_sums) {
  const auto xs = x.dimensions();
  const int64_t V = xs.size() ? xs[xs.size() - 1] : 0, rows = xs.size() ? count(xs, 0, xs.size() - 1) : 0;
  if (!V || V > INT32_MAX || !has(*greatest, rows) || !has(*log_sums, rows)) return unfit("log-sums: shapes do not fit");
  if (!rows) return ffi::Error::Success();
  const float* from = x.typed_data();
  float *most = greatest->typed_data(), *logs = log_sums->typed_data();
  const int64_t threads = pool.num_threads() > 1 ? pool.num_threads() : 1, share = (rows + threads - 1) / threads;
  const int64_t apart = share < kLanes ? share : kLanes, panels = (V + kPanel - 1) / kPanel, size = panels * apart + kLanes;
  in_parallel(pool, (rows + apart - 1) / apart, 1, rows * V / (1 << 13), [=](int64_t first, int64_t last) {
    static thread_local std::vector<float> own;
    static thread_local std::vector<int32_t> own_columns;
    const Peaks peaks{resized(own, 2 * size), own.data() + size, resized(own_columns, size)};
    Group groups[kLanes];
    float found[kLanes], sums[kLanes];
    int32_t columns[kLanes];
    for (int64_t i = first * apart; i < rows && i < last * apart; i += apart) {
      const int count = rows - i < apart ? rows - i : apart;
      for (int64_t p = 0; p < panels; p++) {
        for (int g = 0; g < count; g++)
          for (int q = 0; q < kParts; q++) {
            const int64_t k = p * kPanel + q * kLanes, n = V > k ? V - k : 0;
            groups[g][q] = only(load(from + (i + g) * V + k, n), n);
          }
        find_peaks(groups, count, true, peaks.at(p * apart));
      }
      join_peaks(peaks, apart, panels, true, {found, sums, columns});
      for (int g = 0; g < count; g++)
        most[i + g] = found[g], logs[i + g] = columns[g] < 0 ? NAN : found[g] == -INFINITY ? 0.0f : sums[g];
    }
  });
  return ffi::Error::Success();
}

// -------------------------------------------------------------------------------------------------------------- attention

static inline int64_t within(int64_t length, int64_t most) { return length < 0 ? 0 : length < most ? length : most; }

// Where keys and values lie: the i-th, `apart` values apart. `common`: how many of the first `most` are those of another such place.
struct InOrder {
  const float *keys, *values;
  int64_t apart;
  int64_t common(const InOrder& other, int64_t most) const { return keys == other.keys ? most : 0; }
  const float* key(int64_t i) const { return keys + i * apart; }
  const float* value(int64_t i) const { return values + i * apart; }
};

// The i-th in slot path[i], of which the last one is `last`.
struct OnPath {
  InOrder slots;
  const int32_t* path;
  int64_t last;
  int64_t common(const OnPath& other, int64_t most) const {
    int64_t i = 0;
    while (i < most && path[i] == other.path[i]) i++;
    return slots.common(other.slots, i);
  }
  const float* key(int64_t i) const { return slots.key(within(path[i], last)); }
  const float* value(int64_t i) const { return slots.value(within(path[i], last)); }
};

// Those of two places, one after the other.
template <typename First>
struct Joined {
  First first;
  int64_t count;  // of the first
  InOrder second;
  int64_t common(const Joined& other, int64_t most) const {
    const int64_t both = count < other.count ? count : other.count;
    return first.common(other.first, most < both ? most : both);
  }
  const float* key(int64_t i) const { return i < count ? first.key(i) : second.key(i - count); }
  const float* value(int64_t i) const { return i < count ? first.value(i) : second.value(i - count); }
};

// What is made of the product of a query and a key: c · tanh(product / divisor / c), c > 0, or with c = 0 product / divisor.
struct Scoring {
  float divisor, cap;
};

// A query, which sees the first `live` keys and values of a place; `scores`: memory for `live` + kLanes numbers.
template <typename Place>
struct Query {
  Place place;
  const float *q, *bias;
  int64_t live;
  float *out, *scores;
};

// Writes the scores of the keys s .. end - 1, given the first products of each and the query, by lanes. Returns the greatest ones.
template <typename Place>
static inline __attribute__((always_inline)) Vec score(const Query<Place>& of, int64_t s, int64_t end, int64_t K, Scoring how,
                                                       const Vec* products, Vec most) {
  const int64_t whole = K / kLanes * kLanes, left = of.live - s;
  Vec v = sums_of(products);
  if (whole < K) {
    store(of.scores + s, v);
    for (int64_t i = s; i < end; i++)
      for (int64_t k = whole; k < K; k++) of.scores[i] += of.q[k] * of.place.key(i)[k];
    v = load(of.scores + s);
  }
  v = v / how.divisor;
  if (how.cap > 0) v = capped(v, how.cap);
  if (of.bias) v += load(of.bias + s, left);
  if (left < kLanes) v = kFirst < (float)left ? v : all(-INFINITY);
  store(of.scores + s, v);
  return v > most ? v : most;
}

// Queries [M] over their keys and values, of which the first `common` are those of all: out = Σ softmax(score(q · k) + bias) v.
// What all see is loaded once; each has the bits that it has alone. `next`: the keys that are likely to be read after these, which
// lie K values apart, too; none: these were read just now.
template <int M, typename Place>
static void attend(const Query<Place>* of, int64_t common, const float* next, int64_t K, Scoring how) {
  int64_t shared = common;
  for (int m = 0; m < M; m++) shared = of[m].live < shared ? of[m].live : shared;
  const int64_t whole = K / kLanes * kLanes, turn = shared > kSlotsAhead ? shared - kSlotsAhead : 0;
  Vec most[M];
  for (int m = 0; m < M; m++) most[m] = all(-INFINITY);
  // The products of a key and queries first .. first + n - 1.
  const auto multiply = [&](int64_t i, int first, auto n, Vec (*products)[kLanes]) __attribute__((always_inline)) {
    constexpr int N = decltype(n)::value;
    const Place& place = of[first].place;
    const float* key = place.key(i);
    if (next && i < shared) {
      // Too short a run for the processor to foresee: keys and values of the slots that come next, at the end the next head's.
      const int64_t ahead = i < turn ? kSlotsAhead * K : next + (i - turn) * K - key;
      const float* value = place.value(i);
      for (int64_t k = 0; k < K; k += 16) {
        __builtin_prefetch(key + ahead + k, 0, 3);
        __builtin_prefetch(value + ahead + k, 0, 3);
      }
    }
    Vec sums[N] = {};
    for (int64_t k = 0; k < whole; k += kLanes) {
      const Vec part = load(key + k);
#pragma GCC unroll 8
      for (int m = 0; m < N; m++) sums[m] += load(of[first + m].q + k) * part;
    }
#pragma GCC unroll 8
    for (int m = 0; m < N; m++) products[m][i % kLanes] = sums[m];
  };
  int64_t s = 0;
  if (M > 1)
    for (; s + kLanes <= shared; s += kLanes) {
      Vec products[M][kLanes];
      for (int64_t i = s; i < s + kLanes; i++) multiply(i, 0, std::integral_constant<int, M>(), products);
      for (int m = 0; m < M; m++) most[m] = score(of[m], s, s + kLanes, K, how, products[m], most[m]);
    }
  for (int m = 0; m < M; m++) {
    Vec products[1][kLanes] = {};
    for (int64_t from = s; from < of[m].live; from += kLanes) {
      const int64_t end = of[m].live - from < kLanes ? of[m].live : from + kLanes;
      for (int64_t i = from; i < end; i++) multiply(i, m, std::integral_constant<int, 1>(), products);
      most[m] = score(of[m], from, end, K, how, products[0], most[m]);
    }
  }
  float scales[M];
  for (int m = 0; m < M; m++) {
    const float greatest = greatest_of(most[m]);
    Vec totals = {};
    for (int64_t at = 0; at < of[m].live; at += kLanes) {
      const Vec e = exp_of(load(of[m].scores + at) - greatest);
      totals += e;
      store(of[m].scores + at, e);
    }
    // No slot, no output; a score that is not a number makes a total that is none.
    scales[m] = of[m].live ? 1.0f / sum_of(totals) : 0.0f;
  }
  const auto vectors = [&](int64_t k, auto count) __attribute__((always_inline)) {
    constexpr int kCount = decltype(count)::value;
    Vec sums[M][kCount] = {};
    for (int64_t at = 0; at < shared; at++) {
      const float* value = of[0].place.value(at) + k;
      Vec parts[kCount];
#pragma GCC unroll 4
      for (int j = 0; j < kCount; j++) parts[j] = load(value + j * kLanes);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int j = 0; j < kCount; j++) sums[m][j] += of[m].scores[at] * parts[j];
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      for (int64_t at = shared; at < of[m].live; at++) {
        const float* value = of[m].place.value(at) + k;
#pragma GCC unroll 4
        for (int j = 0; j < kCount; j++) sums[m][j] += of[m].scores[at] * load(value + j * kLanes);
      }
#pragma GCC unroll 4
      for (int j = 0; j < kCount; j++) store(of[m].out + k + j * kLanes, sums[m][j] * scales[m]);
    }
  };
  int64_t k = 0;
  for (; k + 4 * kLanes <= K; k += 4 * kLanes) vectors(k, std::integral_constant<int, 4>());
  for (; k + kLanes <= K; k += kLanes) vectors(k, std::integral_constant<int, 1>());
  for (; k < K; k++)
    for (int m = 0; m < M; m++) {
      float sum = 0;
      for (int64_t at = 0; at < of[m].live; at++) sum += of[m].scores[at] * of[m].place.value(at)[k];
      of[m].out[k] = sum * scales[m];
    }
}

// As many queries as `attend` may take: their sums, and a line of values, stay in registers.
constexpr int kTogether = sizeof(Vec) == 64 ? 5 : 2;

template <int M, typename Place>
static void attend_up_to(int count, const Query<Place>* of, int64_t common, const float* next, int64_t K, Scoring how) {
  if constexpr (M > 1)
    if (count < M) return attend_up_to<M - 1>(count, of, common, next, K, how);
  attend<M>(of, common, next, K, how);
}

static float* room_for(int64_t scores) {
  static thread_local std::vector<float> own;
  return resized(own, scores);
}

// Attends for those of T queries that `make(t, query)` makes, but for where its scores go, where it returns true. `slots`: the most
// that one sees.
template <typename Place, typename Make>
static void attend_all(int64_t T, int64_t slots, const float* next, int64_t K, Scoring how, const Make& make) {
  const int64_t each = slots + kLanes;
  float* scores = room_for(kTogether * each);
  Query<Place> of[kTogether];
  int64_t common = slots;
  int n = 0;
  for (int64_t t = 0; t < T; t++) {
    if (make(t, of[n])) {
      of[n].scores = scores + n * each;
      const int64_t most = of[n].live < common ? of[n].live : common;
      common = n ? of[0].place.common(of[n].place, most) : most;
      n++;
    }
    if (n < kTogether && t + 1 < T) continue;
    if (n) attend_up_to<kTogether>(n, of, common, next, K, how), next = nullptr;
    n = 0, common = slots;
  }
}

// Whether a query is computed: `live [B, T]`, of no elements where all are.
struct Live {
  const bool* of;
  int64_t T;
  bool operator()(int64_t b, int64_t t) const { return !of || of[b * T + t]; }
  static Live read(ffi::Buffer<ffi::PRED> live, int64_t T) { return {live.element_count() ? live.typed_data() : nullptr, T}; }
};

// f(row, head) for all of them; `each`: multiplications of one.
template <typename Do>
static void for_heads(ffi::ThreadPool& pool, int64_t B, int64_t H, int64_t each, const Do& f) {
  in_parallel(pool, B * H, 1 + (1 << 16) / (each + 1), B * H * each / (1 << 15), [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) f(i / H, i % H);
  });
}

// Rotates the features of a head, in pairs that lie half of them apart. Not inlined, as `capped`.
static __attribute__((noinline)) void rotate(float* x, int64_t half, const float* cosines, const float* sines) {
  for (int64_t k = 0; k < half; k += kLanes) {
    const int64_t n = half - k;
    const Vec a = load(x + k, n), b = load(x + half + k, n), c = load(cosines + k, n), s = load(sines + k, n);
    store(x + k, a * c - b * s, n);
    store(x + half + k, b * c + a * s, n);
  }
}

// Queries [.., H·K], keys and values [.., G·K] side by side. Each head of queries and keys is divided by its root mean square and
// multiplied by a scale [K], of which there may be none, then rotated by angles of which row i has those of line i % M of M, or of
// none. Rows that are not live stay as they lay.
static ffi::Error Heads(ffi::ThreadPool pool, Floats query, Floats key, Floats value, Floats query_scale, Floats key_scale,
                        Floats cosines, Floats sines, Flags live, Out<ffi::F32> out, int64_t features) {
  const auto qs = query.dimensions(), ks = key.dimensions(), as = cosines.dimensions();
  const int64_t K = features, half = K / 2, N = qs.size() ? count(qs, 0, qs.size() - 1) : -1;
  const int64_t M = as.size() ? count(as, 0, as.size() - 1) : -1;
  if (N < 0 || M < 0 || !ks.size() || K < 1) return unfit("heads: expected rows of queries, keys and values");
  const int64_t wide = qs[qs.size() - 1], narrow = ks[ks.size() - 1], width = wide + 2 * narrow;
  if (wide % K || narrow % K || !has(key, N * narrow) || !has(value, N * narrow) || !has(*out, N * width) ||
      !may_have(query_scale, K) || !may_have(key_scale, K) || !has(cosines, M * half) || !has(sines, M * half) ||
      (M && (N % M || K % 2)) || !may_have(live, N))
    return unfit("heads: shapes do not fit");
  const float *from[] = {query.typed_data(), key.typed_data()}, *values = value.typed_data();
  const Before norms[] = {{kRootMeanSquare, 0, 0, or_none(query_scale), nullptr},
                          {kRootMeanSquare, 0, 0, or_none(key_scale), nullptr}};
  const float *cosine = cosines.typed_data(), *sine = sines.typed_data();
  const Live counts = Live::read(live, 1);
  float* y = out->typed_data();
  in_parallel(pool, N, 1 + (1 << 13) / (width + 1), N * width / (1 << 14), [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      if (!counts(i, 0)) continue;
      float* to = y + i * width;
      for (int part = 0; part < 2; part++) {
        const int64_t size = part ? narrow : wide;
        for (int64_t at = 0; at < size; at += K, to += K) {
          if (norms[part].scale) prepared(norms[part], from[part] + i * size + at, K, to);
          else std::memcpy(to, from[part] + i * size + at, sizeof(float) * K);
          if (M) rotate(to, half, cosine + i % M * half, sine + i % M * half);
        }
      }
      std::memcpy(to, values + i * narrow, sizeof(float) * narrow);
    }
  });
  return ffi::Error::Success();
}

// Cosines and sines of position · step, [N, half], for positions [N] and steps [half].
static ffi::Error Angles(Integers positions, Floats steps, Out<ffi::F32> cosines, Out<ffi::F32> sines) {
  const int64_t N = positions.element_count(), half = steps.element_count();
  if (!has(*cosines, N * half) || !has(*sines, N * half)) return unfit("angles: shapes do not fit");
  for (int64_t i = 0; i < N * half; i++) {
    const float angle = (float)positions.typed_data()[i / half] * steps.typed_data()[i % half];
    cosines->typed_data()[i] = std::cos(angle);
    sines->typed_data()[i] = std::sin(angle);
  }
  return ffi::Error::Success();
}

// T new positions of B rows, queries of H heads and keys and values of G, [B, T, (H + 2·G)·K], and caches [B, G, S, K] of keys and
// values, to which they are written and attend.
struct Cached {
  int64_t B, T, H, G, S, K, width;
  const float* x;
  float *keys, *values;
  const float* query(int64_t b, int64_t t, int64_t h) const { return x + (b * T + t) * width + h * K; }
  // Of the heads of keys and values those of a head of queries.
  int64_t shared(int64_t h) const { return h / (H / G); }
  InOrder slots(int64_t b, int64_t g, int64_t first) const {
    const int64_t at = ((b * G + g) * S + first) * K;
    return {keys + at, values + at, K};
  }
  // Writes the keys and values of a row and a head to the slots from `begin` on.
  void write(int64_t b, int64_t g, int64_t begin, const Live& counts) const {
    for (int64_t t = 0; t < T; t++) {
      if (!counts(b, t)) continue;
      const int64_t to = ((b * G + g) * S + begin + t) * K;
      std::memcpy(keys + to, query(b, t, H + g), sizeof(float) * K);
      std::memcpy(values + to, query(b, t, H + G + g), sizeof(float) * K);
    }
  }
};

// Reads it, after which the caches are those of the results; false where shapes do not fit.
static bool read_cached(Floats qkv, Floats keys, Floats values, Out<ffi::F32> out, Out<ffi::F32> new_keys, Out<ffi::F32> new_values,
                        Cached& to) {
  const auto qs = qkv.dimensions(), cs = keys.dimensions();
  if (qs.size() != 3 || cs.size() < 3) return false;
  const int64_t B = qs[0], T = qs[1], K = cs[cs.size() - 1], S = cs[cs.size() - 2], G = cs[cs.size() - 3], width = qs[2];
  const int64_t H = K ? width / K - 2 * G : 0, size = B * G * S * K;
  if (G < 1 || H < G || H % G || (H + 2 * G) * K != width || T > S || !has(keys, size) || !has(values, size) ||
      !has(*new_keys, size) || !has(*new_values, size) || !has(*out, B * T * H * K))
    return false;
  to = {B, T, H, G, S, K, width, qkv.typed_data(), new_keys->typed_data(), new_values->typed_data()};
  if (to.keys != keys.typed_data()) std::memcpy(to.keys, keys.typed_data(), sizeof(float) * size);
  if (to.values != values.typed_data()) std::memcpy(to.values, values.typed_data(), sizeof(float) * size);
  return true;
}

// Further keys and values [B, G, L, K] to which the queries of a row attend by the same softmax, the first lengths[b]; L = 0: none.
struct Further {
  const float *keys, *values;
  const int32_t* lengths;
  int64_t G, L, K;
  int64_t live(int64_t b) const { return L ? within(lengths[b], L) : 0; }
  InOrder slots(int64_t b, int64_t g) const { return {keys + (b * G + g) * L * K, values + (b * G + g) * L * K, K}; }
};

static bool read_further(Floats keys, Floats values, Integers lengths, const Cached& of, Further& to) {
  const auto ks = keys.dimensions();
  const int64_t L = keys.element_count() && ks.size() >= 2 ? ks[ks.size() - 2] : 0, size = of.B * of.G * L * of.K;
  to = {keys.typed_data(), values.typed_data(), lengths.typed_data(), of.G, L, of.K};
  return has(keys, size) && has(values, size) && (has(lengths, of.B) || (!L && has(lengths, 0)));
}

// Does what `attend_all` does, over further keys and values, too, if there are any.
template <typename Place, typename Make>
static void attend_to_both(const Further& more, int64_t b, int64_t g, int64_t T, int64_t slots, const float* next, int64_t K,
                           Scoring how, const Make& make) {
  if (!more.L) return attend_all<Place>(T, slots, next, K, how, make);
  attend_all<Joined<Place>>(T, slots + more.L, next, K, how, [&](int64_t t, Query<Joined<Place>>& query) {
    Query<Place> own;
    if (!make(t, own)) return false;
    query = {{own.place, own.live, more.slots(b, g)}, own.q, nullptr, own.live + more.live(b), own.out, nullptr};
    return true;
  });
}

// The first position that a query at this one sees.
static int64_t first_seen(int64_t at, int64_t window) { return window && at >= window ? at + 1 - window : 0; }

// The bias of a head's keys from position `first` on, for the query at position `at`, where `table [H, P]`, if there is one, is that
// of the last of P positions.
static const float* bias_of(const float* table, int64_t P, int64_t h, int64_t at, int64_t first) {
  return table ? table + h * P + P - 1 - at + first : nullptr;
}

// Writes keys and values of `qkv` (see `Cached`) to slots positions[b] .. of the caches, in place, and attends to all slots up to
// each query's own, the last `window` of them unless that is 0. `bias [H, S]`: of the last position, so that a key i positions back
// has the i-th from the end; or of no elements. Queries that are not live write nothing, and their output is 0, or without `clear`
// whatever lay there; those of a row that are live come first.
static ffi::Error SelfAttention(ffi::ThreadPool pool, Floats qkv, Floats keys, Floats values, Floats bias, Integers positions,
                                Flags live, Floats more_keys, Floats more_values, Integers more_lengths, Out<ffi::F32> out,
                                Out<ffi::F32> new_keys, Out<ffi::F32> new_values, float divisor, float cap, int64_t window,
                                bool clear) {
  Cached of;
  Further more;
  if (!read_cached(qkv, keys, values, out, new_keys, new_values, of) || !may_have(bias, of.H * of.S) ||
      !has(positions, of.B) || !may_have(live, of.B * of.T) || !read_further(more_keys, more_values, more_lengths, of, more) ||
      (more.L && bias.element_count()) || window < 0)
    return unfit("self-attention: shapes do not fit");
  const float* table = or_none(bias);
  const int32_t* begins = positions.typed_data();
  const Live counts = Live::read(live, of.T);
  float* y = out->typed_data();
  // As XLA does with a slice that would reach past the end.
  const auto begin_of = [=](int64_t b) { return within(begins[b], of.S - of.T); };
  int64_t longest = 0;
  for (int64_t b = 0; b < of.B; b++) longest = begins[b] > longest ? begins[b] : longest;
  for_heads(pool, of.B, of.G, of.T * of.K, [=](int64_t b, int64_t g) { of.write(b, g, begin_of(b), counts); });
  for_heads(pool, of.B, of.H, of.T * (longest + of.T + more.L) * of.K * 2, [=](int64_t b, int64_t h) {
    const int64_t g = of.shared(h), begin = begin_of(b);
    const float* next = of.slots(b, g + 1, 0).keys;
    attend_to_both<InOrder>(more, b, g, of.T, of.S, next, of.K, {divisor, cap}, [&](int64_t t, Query<InOrder>& query) {
      const int64_t at = begin + t, first = first_seen(at, window);
      float* to = y + ((b * of.T + t) * of.H + h) * of.K;
      query = {of.slots(b, g, first), of.query(b, t, h), bias_of(table, of.S, h, at, first), at + 1 - first, to, nullptr};
      if (!counts(b, t) && clear) std::memset(to, 0, sizeof(float) * of.K);
      return counts(b, t);
    });
  });
  return ffi::Error::Success();
}

// table [N, D] at `numbers`, of which those past an end take the row there; 0 where `live`, if it has elements, is false.
static ffi::Error Rows(Floats table, Integers numbers, Flags live, ffi::ResultBuffer<ffi::F32> out) {
  const auto ts = table.dimensions();
  const int64_t count = numbers.element_count(), N = ts.size() == 2 ? ts[0] : 0, D = N ? ts[1] : 0;
  if (!N || !has(*out, count * D) || !may_have(live, count)) return unfit("rows: shapes do not fit");
  const bool some = live.element_count() > 0;
  for (int64_t i = 0; i < count; i++) {
    const int64_t number = numbers.typed_data()[i], row = number < 0 ? 0 : number < N ? number : N - 1;
    float* to = out->typed_data() + i * D;
    if (!some || live.typed_data()[i]) std::memcpy(to, table.typed_data() + row * D, sizeof(float) * D);
    else std::memset(to, 0, sizeof(float) * D);
  }
  return ffi::Error::Success();
}

// As Rows, for the first `columns` columns of a weight in panels [P, D, kPanel], which are the rows of a table.
static ffi::Error Columns(ffi::ThreadPool pool, Floats panels, Integers numbers, Flags live, ffi::ResultBuffer<ffi::F32> out,
                          int64_t columns) {
  const auto ps = panels.dimensions();
  const int64_t count = numbers.element_count(), P = ps.size() == 3 && ps[2] == kPanel ? ps[0] : 0, D = P ? ps[1] : 0;
  if (columns < 1 || (columns + kPanel - 1) / kPanel != P || !has(*out, count * D) || !may_have(live, count))
    return unfit("columns: shapes do not fit");
  const int32_t* number = numbers.typed_data();
  const float* from = panels.typed_data();
  const bool *counts = live.typed_data(), some = live.element_count() > 0;
  float* to = out->typed_data();
  in_parallel(pool, count, 1 + (1 << 13) / (D + 1), count * D / (1 << 13), [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      const int64_t column = number[i] < 0 ? 0 : number[i] < columns ? number[i] : columns - 1;
      const float* line = from + column / kPanel * D * kPanel + column % kPanel;
      if (some && !counts[i]) std::memset(to + i * D, 0, sizeof(float) * D);
      else
        for (int64_t d = 0; d < D; d++) to[i * D + d] = line[d * kPanel];
    }
  });
  return ffi::Error::Success();
}

// Queries [B, T, H·K] over the first lengths[b] of L keys and values [B, G, L, K], which as many heads of queries share.
static ffi::Error CrossAttention(ffi::ThreadPool pool, Floats query, Floats keys, Floats values, Integers lengths, Flags live,
                                 Out<ffi::F32> out, float divisor, float cap, bool clear) {
  const auto qs = query.dimensions(), cs = keys.dimensions();
  if (qs.size() != 3 || cs.size() < 3) return unfit("cross-attention: expected queries [B, T, H·K] and keys [.., G, L, K]");
  const int64_t B = qs[0], T = qs[1], width = qs[2], K = cs[cs.size() - 1], L = cs[cs.size() - 2], G = cs[cs.size() - 3];
  const int64_t H = K ? width / K : 0;
  if (G < 1 || H < G || H % G || H * K != width || !has(keys, B * G * L * K) || !has(values, B * G * L * K) ||
      !has(*out, B * T * width) || !has(lengths, B) || !may_have(live, B * T))
    return unfit("cross-attention: shapes do not fit");
  const float *x = query.typed_data(), *key = keys.typed_data(), *value = values.typed_data();
  const int32_t* ends = lengths.typed_data();
  const Live counts = Live::read(live, T);
  float* y = out->typed_data();
  for_heads(pool, B, H, T * L * K * 2, [=](int64_t b, int64_t h) {
    const int64_t own = (b * G + h / (H / G)) * L * K;
    const InOrder place{key + own, value + own, K};
    attend_all<InOrder>(T, L, place.key(L), K, {divisor, cap}, [&](int64_t t, Query<InOrder>& query) {
      const int64_t at = (b * T + t) * width + h * K;
      query = {place, x + at, nullptr, within(ends[b], L), y + at, nullptr};
      if (!counts(b, t) && clear) std::memset(y + at, 0, sizeof(float) * K);
      return counts(b, t);
    });
  });
  return ffi::Error::Success();
}

// As SelfAttention, for nodes of a tree: node t of a row is written to slot starts[b] + t, stands at positions[b, t] of its
// sequence, and sees the slots paths[b, t, 0 .. positions[b, t]], its ancestors from the first position to itself.
// `bias [H, P]`: as there, of the last of P positions.
static ffi::Error NodeAttention(ffi::ThreadPool pool, Floats qkv, Floats keys, Floats values, Floats bias, Integers starts,
                                Integers positions, Integers paths, Flags live, Floats more_keys, Floats more_values,
                                Integers more_lengths, Out<ffi::F32> out, Out<ffi::F32> new_keys, Out<ffi::F32> new_values,
                                float divisor, float cap, int64_t window, bool clear) {
  const auto ps = paths.dimensions();
  if (ps.size() != 3) return unfit("node attention: expected paths [B, T, P]");
  const int64_t P = ps[2];
  Cached of;
  Further more;
  if (!read_cached(qkv, keys, values, out, new_keys, new_values, of) || !may_have(bias, of.H * P) || !has(starts, of.B) ||
      !has(positions, of.B * of.T) || !has(paths, of.B * of.T * P) || !may_have(live, of.B * of.T) ||
      !read_further(more_keys, more_values, more_lengths, of, more) || (more.L && bias.element_count()) || window < 0)
    return unfit("node attention: shapes do not fit");
  const float* table = or_none(bias);
  const int32_t *begins = starts.typed_data(), *at = positions.typed_data(), *path = paths.typed_data();
  const Live counts = Live::read(live, of.T);
  float* y = out->typed_data();
  int64_t longest = 0;
  for (int64_t i = 0; i < of.B * of.T; i++) longest = at[i] > longest ? at[i] : longest;
  for_heads(pool, of.B, of.G, of.T * of.K,
            [=](int64_t b, int64_t g) { of.write(b, g, within(begins[b], of.S - of.T), counts); });
  for_heads(pool, of.B, of.H, of.T * (longest + 1 + more.L) * of.K * 2, [=](int64_t b, int64_t h) {
    const int64_t g = of.shared(h);
    const float* next = of.slots(b, g + 1, 0).keys;
    attend_to_both<OnPath>(more, b, g, of.T, P, next, of.K, {divisor, cap}, [&](int64_t t, Query<OnPath>& query) {
      const int64_t i = b * of.T + t, last = within(at[i], P - 1), first = first_seen(last, window);
      const OnPath own{of.slots(b, g, 0), path + i * P + first, of.S - 1};
      float* to = y + (i * of.H + h) * of.K;
      query = {own, of.query(b, t, h), bias_of(table, P, h, last, first), last + 1 - first, to, nullptr};
      if (!counts(b, t) && clear) std::memset(to, 0, sizeof(float) * of.K);
      return counts(b, t);
    });
  });
  return ffi::Error::Success();
}

// Copies the slots sources[b, 0 .. M − 1] of caches [B, H, S, K] to the M slots from starts[b] on, in place, as if all were read
// before any is written.
static ffi::Error Move(Floats keys, Floats values, Integers sources, Integers starts, Out<ffi::F32> new_keys,
                       Out<ffi::F32> new_values) {
  const auto ss = sources.dimensions(), cs = keys.dimensions();
  if (ss.size() != 2 || cs.size() < 3) return unfit("move: expected sources [B, M] and caches [.., H, S, K]");
  const int64_t B = ss[0], M = ss[1], K = cs[cs.size() - 1], S = cs[cs.size() - 2], H = cs[cs.size() - 3], size = B * H * S * K;
  if (M > S || !has(keys, size) || !has(values, size) || !has(*new_keys, size) || !has(*new_values, size) || !has(starts, B))
    return unfit("move: shapes do not fit");
  static thread_local std::vector<float> own;
  float* moved = resized(own, M * K);
  const auto move = [&](const float* from, float* to) {
    if (to != from) std::memcpy(to, from, sizeof(float) * size);
    for (int64_t row = 0; row < B * H; row++, to += S * K) {
      const int64_t b = row / H;
      for (int64_t m = 0; m < M; m++)
        std::memcpy(moved + m * K, to + within(sources.typed_data()[b * M + m], S - 1) * K, sizeof(float) * K);
      std::memcpy(to + within(starts.typed_data()[b], S - M) * K, moved, sizeof(float) * M * K);
    }
  };
  move(keys.typed_data(), new_keys->typed_data());
  move(values.typed_data(), new_values->typed_data());
  return ffi::Error::Success();
}

// Rows sources[i] of x [M, ..] for i < count[0] to rows targets[i] of y [N, ..], in place.
static ffi::Error Put(ffi::ThreadPool pool, Floats y, Floats x, Integers sources, Integers targets, Integers count,
                      Out<ffi::F32> new_y) {
  const auto ys = y.dimensions(), xs = x.dimensions();
  if (!ys.size() || !xs.size()) return unfit("put: expected rows");
  const int64_t N = ys[0], M = xs[0], listed = sources.element_count(), size = N ? (int64_t)y.element_count() / N : 0;
  if (!has(x, M * size) || !has(targets, listed) || !has(count, 1) || !has(*new_y, N * size))
    return unfit("put: shapes do not fit");
  const float *given = y.typed_data(), *from = x.typed_data();
  const int32_t *read = sources.typed_data(), *written = targets.typed_data();
  float* to = new_y->typed_data();
  if (to != given) std::memcpy(to, given, sizeof(float) * N * size);
  const int64_t total = M ? within(count.typed_data()[0], listed) : 0;
  in_parallel(pool, total, 1 + (1 << 14) / (size + 1), total * size / (1 << 14), [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++)
      std::memcpy(to + within(written[i], N - 1) * size, from + within(read[i], M - 1) * size, sizeof(float) * size);
  });
  return ffi::Error::Success();
}

// The panels of a matrix [lines, columns], whose elements lie so far apart; columns past the last are 0.
static void pack(const float* from, int64_t line, int64_t column, int64_t lines, int64_t columns, float* to) {
  for (int64_t begin = 0; begin < columns; begin += kPanel)
    for (int64_t l = 0; l < lines; l++, to += kPanel)
      for (int64_t j = 0; j < kPanel; j++) to[j] = begin + j < columns ? from[l * line + (begin + j) * column] : 0.0f;
}

// sums [m, P panels] += x · w for lines begin .. end - 1 of P panels, m up to `rows_for(kWide)`, rows of x `apart` values apart.
template <int P>
static void add_lines(const float* x, int64_t apart, int m, const float* w, int64_t lines, int64_t begin, int64_t end, float* sums) {
  const Panels<float> panels{w, lines * kPanel, (int)lines, (int)begin, (int)end, 0, INT32_MAX, 0};  // all of them are cached
  block_of<P, 1, float>(m, {x, nullptr, apart, 0}, panels, sums, std::make_integer_sequence<int, rows_for(kWide)>());
}

// f(panel, P) for as many panels at a time as blocks of many rows have.
template <typename Do>
static void for_panels(int64_t panels, const Do& f) {
  int64_t p = 0;
  for (; p + kWide <= panels; p += kWide) f(p, std::integral_constant<int, kWide>());
  for (; p < panels; p++) f(p, std::integral_constant<int, 1>());
}

// One head of an encoder's row: keys and values of its `live` positions, in panels, and the bias of distance s − t at bias[s − t].
// Position t sees those from t + 1 − window to t + ahead; with a window of 0 all.
struct EncoderHead {
  const float *keys, *values, *bias;
  int64_t live, K, window, ahead;
  Scoring how;

  static constexpr int kRows = rows_for(kWide), kQueries = 4 * kRows, kLines = 256;
  int64_t width() const { return (live + kPanel - 1) / kPanel * kPanel; }

  // n queries from the t-th on, rows of `q` and `out` so many values apart; `scores`: kQueries rows of width().
  void attend(int64_t t, int n, const float* q, int64_t q_apart, float* scores, float* out, int64_t apart) const {
    Vec greatest[kQueries];
    for (int i = 0; i < n; i++) greatest[i] = all(-INFINITY);
    // The panels of the positions that any of these queries sees, and the first and last of these positions.
    const int64_t low = window && t + 1 > window ? (t + 1 - window) / kPanel : 0, first = low * kPanel;
    const int64_t last = window && t + n + ahead < live ? t + n + ahead : live, high = (last + kPanel - 1) / kPanel;
    for_panels(high - low, [&](int64_t place, auto side) {
      constexpr int kWidth = decltype(side)::value * kPanel;
      const int64_t p = low + place;
      for (int i = 0; i < n; i += kRows) {
        const int m = n - i < kRows ? n - i : kRows;
        float sums[kRows * kWidth] = {};
        add_lines<decltype(side)::value>(q + i * q_apart, q_apart, m, keys + p * kPanel * K, K, 0, K, sums);
        for (int r = 0; r < m; r++)
          for (int j = 0; j < kWidth; j += kLanes) {
            const int64_t s = p * kPanel + j, left = live > s ? live - s : 0;
            Vec v = load(sums + r * kWidth + j) / how.divisor;
            if (how.cap > 0) v = capped(v, how.cap);
            if (bias) v += load(bias + s - (t + i + r), left);
            if (window) {
              const Vec back = all((float)(t + i + r - s)) - kFirst;
              v = back < (float)window ? v : all(-INFINITY);
              v = back < (float)-ahead ? all(-INFINITY) : v;
            }
            if (left < kLanes) v = kFirst < (float)left ? v : all(-INFINITY);
            greatest[i + r] = v > greatest[i + r] ? v : greatest[i + r];
            store(scores + (i + r) * width() + s, v);
          }
      }
    });
    float scales[kQueries];
    for (int i = 0; i < n; i++) {
      const float most = greatest_of(greatest[i]);
      Vec totals = {};
      for (float *at = scores + i * width() + first, *end = scores + i * width() + high * kPanel; at < end; at += kLanes) {
        const Vec e = exp_of(load(at) - most);
        totals += e;
        store(at, e);
      }
      scales[i] = 1.0f / sum_of(totals);  // a score that is not a number makes a total that is none
    }
    for_panels((K + kPanel - 1) / kPanel, [&](int64_t p, auto side) {
      constexpr int kWidth = decltype(side)::value * kPanel;
      float sums[kQueries * kWidth] = {};
      for (int64_t begin = first; begin < last; begin += kLines)
        for (int i = 0; i < n; i += kRows)
          add_lines<decltype(side)::value>(scores + i * width(), width(), n - i < kRows ? n - i : kRows,
                                           values + p * kPanel * live, live, begin, begin + kLines < last ? begin + kLines : last,
                                           sums + i * kWidth);
      for (int i = 0; i < n; i++)
        for (int j = 0; j < kWidth && p * kPanel + j < K; j += kLanes)
          store(out + i * apart + p * kPanel + j, load(sums + i * kWidth + j) * scales[i], K - p * kPanel - j);
    });
  }
};

// The first lengths[b] positions of qkv [B, L, (H + 2·G)·K] over each other, those in its window of each, 0 for the others; bias
// [H, 2·L − 1] by distance from query to key, from 1 − L on, or [H, 0].
static ffi::Error EncoderAttention(ffi::ThreadPool pool, Floats qkv, Floats bias, Integers lengths, Out<ffi::F32> out,
                                   float divisor, float cap, int64_t window, int64_t ahead) {
  const auto qs = qkv.dimensions(), bs = bias.dimensions(), os = out->dimensions();
  if (qs.size() != 3 || bs.size() != 2 || os.size() != 3)
    return unfit("encoder attention: expected queries [B, L, (H + 2·G)·K] and bias [H, 2·L − 1]");
  const int64_t B = qs[0], L = qs[1], H = bs[0], width = os[2], K = H ? width / H : 0, G = K ? (qs[2] - width) / (2 * K) : 0;
  if (G < 1 || H % G || K * H != width || (H + 2 * G) * K != qs[2] || !may_have(bias, H * (2 * L - 1)) || !has(*out, B * L * width) ||
      !has(lengths, B) || window < 0 || ahead < 0)
    return unfit("encoder attention: shapes do not fit");
  const float *x = qkv.typed_data(), *table = or_none(bias);
  const int32_t* ends = lengths.typed_data();
  float* y = out->typed_data();
  // Each part packs keys and values for itself, which is little beside so many queries.
  constexpr int64_t kPart = 16 * EncoderHead::kQueries;
  const int64_t parts = (L + kPart - 1) / kPart, each = (L + parts - 1) / (parts + !parts) * L * K * 2;
  in_parallel(pool, B * H * parts, 1 + (1 << 14) / (each + 1), B * H * parts * each / (1 << 15), [=](int64_t begin, int64_t end) {
    static thread_local std::vector<float> own_packed, own_scores;
    for (int64_t i = begin; i < end; i++) {
      const int64_t b = i / parts / H, h = i / parts % H, live = within(ends[b], L);
      const int64_t first = i % parts * kPart, last = first + kPart < L ? first + kPart : L, counted = last < live ? last : live;
      const int64_t apart = (H + 2 * G) * K;
      const float *from = x + b * L * apart + h * K, *key = x + b * L * apart + (H + h / (H / G)) * K;
      float *to = y + b * L * width + h * K, *keys, *values;
      EncoderHead head{nullptr, nullptr, table ? table + h * (2 * L - 1) + L - 1 : nullptr, live, K, window, ahead, {divisor, cap}};
      if (first < counted) {
        keys = resized(own_packed, head.width() * K + live * ((K + kPanel - 1) / kPanel * kPanel));
        values = keys + head.width() * K;
        pack(key, 1, apart, K, live, keys);
        pack(key + G * K, apart, 1, live, K, values);
        head.keys = keys, head.values = values;
      }
      float* scores = resized(own_scores, EncoderHead::kQueries * head.width());
      for (int64_t t = first; t < counted; t += EncoderHead::kQueries) {
        const int n = counted - t < EncoderHead::kQueries ? counted - t : EncoderHead::kQueries;
        head.attend(t, n, from + t * apart, apart, scores, to + t * width, width);
      }
      for (int64_t t = counted < first ? first : counted; t < last; t++)
        std::memset(to + t * width, 0, sizeof(float) * K);
    }
  });
  return ffi::Error::Success();
}

// --------------------------------------------------------------------------------------------------------------- handlers

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecRows, Rows,
                              ffi::Ffi::Bind().Arg<Floats>().Arg<Integers>().Arg<Flags>().Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecColumns, Columns,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Integers>().Arg<Flags>().Ret<Floats>()
                                  .Attr<int64_t>("columns"));

template <ffi::DataType kType>
static auto product_binding() {
  return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().template Arg<ffi::Buffer<kType>>().template Arg<Floats>()
      .template Arg<Flags>().template Arg<Floats>().template Arg<Floats>().template Arg<Floats>().template Arg<Floats>()
      .template Ret<Floats>().template Attr<int64_t>("before").template Attr<int64_t>("first").template Attr<int64_t>("second")
      .template Attr<bool>("clear").template Attr<float>("cap");
}

template <ffi::DataType kType>
static auto keys_values_binding() {
  return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().template Arg<ffi::Buffer<kType>>().template Arg<Floats>()
      .template Arg<Flags>().template Arg<Floats>().template Ret<Floats>().template Ret<Floats>();
}

template <ffi::DataType kType>
static auto head_binding() {
  return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().template Arg<ffi::Buffer<kType>>().template Arg<Floats>()
      .template Arg<Flags>().template Arg<Floats>().template Ret<Integers>().template Ret<Floats>().template Attr<int64_t>("columns")
      .template Attr<bool>("summed").template Attr<float>("cap");
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecNorm, Norm,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Floats>().Arg<Floats>().Arg<Flags>()
                                  .Ret<Floats>().Attr<int64_t>("before"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecLogSums, LogSums,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Ret<Floats>().Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecProductF32, (ProductOf<ffi::F32, float>), product_binding<ffi::F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecProductS8, (ProductOf<ffi::S8, int8_t>), product_binding<ffi::S8>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecProductW8A8, (ProductOf<ffi::S8, Quad>), product_binding<ffi::S8>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecKeysValuesF32, (KeysValuesOf<ffi::F32, float>), keys_values_binding<ffi::F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecKeysValuesS8, (KeysValuesOf<ffi::S8, int8_t>), keys_values_binding<ffi::S8>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecKeysValuesW8A8, (KeysValuesOf<ffi::S8, Quad>), keys_values_binding<ffi::S8>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecHeadF32, (HeadOf<ffi::F32, float>), head_binding<ffi::F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecHeadS8, (HeadOf<ffi::S8, int8_t>), head_binding<ffi::S8>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecHeadW8A8, (HeadOf<ffi::S8, Quad>), head_binding<ffi::S8>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecAngles, Angles,
                              ffi::Ffi::Bind().Arg<Integers>().Arg<Floats>().Ret<Floats>().Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecHeads, Heads,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Floats>().Arg<Floats>().Arg<Floats>()
                                  .Arg<Floats>().Arg<Floats>().Arg<Floats>().Arg<Flags>().Ret<Floats>().Attr<int64_t>("features"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecSelfAttention, SelfAttention,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Floats>().Arg<Floats>()
                                  .Arg<Floats>().Arg<Integers>().Arg<Flags>().Arg<Floats>().Arg<Floats>().Arg<Integers>()
                                  .Ret<Floats>().Ret<Floats>().Ret<Floats>().Attr<float>("divisor").Attr<float>("cap")
                                  .Attr<int64_t>("window").Attr<bool>("clear"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecNodeAttention, NodeAttention,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Floats>().Arg<Floats>().Arg<Floats>()
                                  .Arg<Integers>().Arg<Integers>().Arg<Integers>().Arg<Flags>().Arg<Floats>().Arg<Floats>()
                                  .Arg<Integers>().Ret<Floats>().Ret<Floats>().Ret<Floats>().Attr<float>("divisor")
                                  .Attr<float>("cap").Attr<int64_t>("window").Attr<bool>("clear"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecMove, Move,
                              ffi::Ffi::Bind().Arg<Floats>().Arg<Floats>().Arg<Integers>().Arg<Integers>().Ret<Floats>()
                                  .Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecPut, Put,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Floats>().Arg<Integers>()
                                  .Arg<Integers>().Arg<Integers>().Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecCrossAttention, CrossAttention,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Floats>().Arg<Floats>()
                                  .Arg<Integers>().Arg<Flags>().Ret<Floats>().Attr<float>("divisor").Attr<float>("cap")
                                  .Attr<bool>("clear"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    SpecdecEncoderAttention, EncoderAttention,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Floats>().Arg<Integers>().Ret<Floats>().Attr<float>("divisor")
        .Attr<float>("cap").Attr<int64_t>("window").Attr<int64_t>("ahead"));
