// Products and attention of a few rows, float32, for XLA's foreign function interface on a CPU.
//
//   product             y [M, F] = x [M, K] · w, w float32 or int8 with a scale for each column, in panels [ceil(F/16), K, 16]
//   attention           of queries over cached keys and values, of an encoder over its own
//
// Every output is one chain of operations in a fixed order (of a product: fused multiply-adds over k = 0 .. K - 1; of an
// attention: over the live slots of its own row and nothing past them). So the bits of a row depend neither on how many
// rows there are, nor on its neighbours, nor on the number of threads.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
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
constexpr int kChunk = 256;    // lines of panels that stay in the cache while all blocks of rows pass over them
constexpr int kAhead = 256;    // lines, of all panels side by side, from where it reads to where it asks for
constexpr int kSlotsAhead = 8;  // of an attention: from the key that is read to the one that is asked for
constexpr int64_t kGroup = 96; // rows whose partial sums are kept at a time

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef float Loose __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef int8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));

static inline Vec load(const float* p) { return *reinterpret_cast<const Loose*>(p); }
static inline void store(float* p, Vec v) { *reinterpret_cast<Loose*>(p) = v; }
static inline Vec load(const int8_t* p) {
  // GCC 12 converts short vectors of bytes element by element, so by intrinsics where it matters.
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  Bytes b = *reinterpret_cast<const Bytes*>(p);
  return __builtin_convertvector(__builtin_convertvector(b, Ints), Vec);
#endif
}
static inline Vec all(float x) { return x - Vec{}; }

static inline float sum_of(Vec v) {
  float lanes[kLanes];
  store(lanes, v);
#pragma GCC unroll 4
  for (int width = kLanes / 2; width >= 1; width /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}

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

// y [rows[i]] = x [i] · w, scaled, for i < M.
template <typename W>
struct Product {
  const float* x;
  const int32_t* rows;
  int64_t M, K;
  const W* w;
  const float* scales;
  float* y;
  int64_t F;
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

// sums [M, P panels] += x [M, K] · w.
template <int M, int P, typename W>
static __attribute__((noinline)) void block(const float* x, int64_t K, const Panels<W>& w, float* sums) {
  Vec s[M][P][kParts];
#pragma GCC unroll 64
  for (int i = 0; i < M; i++)
#pragma GCC unroll 64
    for (int p = 0; p < P; p++)
#pragma GCC unroll 4
      for (int q = 0; q < kParts; q++) s[i][p][q] = load(sums + (i * P + p) * kPanel + q * kLanes);
  // Rows by a few pointers: one for each would take more registers than there are.
  constexpr int kApart = 5, kPointers = (M + kApart - 1) / kApart;
  const float* from[kPointers];
#pragma GCC unroll 64
  for (int j = 0; j < kPointers; j++) {
    from[j] = x + j * kApart * K + w.begin;
    if (kPointers > 1) asm("" : "+r"(from[j]));
  }
  constexpr int kEach = 64 / (kPanel * sizeof(W));  // lines in 64 bytes
  for (int k = w.begin, turn = w.turn; k < w.end; k++) {
    if (k % kEach == 0 && !turn--) {
      turn = w.turns - 1;
      // At the end of these panels the next ones are what comes next.
      const int64_t to = (int64_t)(k + w.ahead) * kPanel + (k + w.ahead < w.lines ? 0 : (P - 1) * w.apart);
#pragma GCC unroll 64
      for (int p = 0; p < P; p++) __builtin_prefetch(w.w + p * w.apart + to, 0, 3);
    }
    Vec u[P][kParts];
#pragma GCC unroll 64
    for (int p = 0; p < P; p++)
#pragma GCC unroll 4
      for (int q = 0; q < kParts; q++) u[p][q] = load(w.w + p * w.apart + (int64_t)k * kPanel + q * kLanes);
#pragma GCC unroll 64
    for (int i = 0; i < M; i++) {
      const Vec v = all(from[i / kApart][i % kApart * K]);
#pragma GCC unroll 64
      for (int p = 0; p < P; p++)
#pragma GCC unroll 4
        for (int q = 0; q < kParts; q++) s[i][p][q] += v * u[p][q];
    }
#pragma GCC unroll 64
    for (int j = 0; j < kPointers; j++) from[j]++;
  }
#pragma GCC unroll 64
  for (int i = 0; i < M; i++)
#pragma GCC unroll 64
    for (int p = 0; p < P; p++)
#pragma GCC unroll 4
      for (int q = 0; q < kParts; q++) store(sums + (i * P + p) * kPanel + q * kLanes, s[i][p][q]);
}

// The block of m rows, kLeast <= m < kLeast + the length of the sequence.
template <int P, int kLeast, typename W, int... M>
static void block_of(int m, const float* x, int64_t K, const Panels<W>& w, float* sums, std::integer_sequence<int, M...>) {
  static constexpr void (*blocks[])(const float*, int64_t, const Panels<W>&, float*) = {block<kLeast + M, P, W>...};
  blocks[m - kLeast](x, K, w, sums);
}

// Sums of m rows, `width` apart, to `count` columns.
static void finish(const float* sums, int width, int m, const int32_t* rows, const float* scales, float* y, int64_t F,
                   int64_t count) {
  for (int i = 0; i < m; i++) {
    const float* from = sums + i * width;
    float* to = y + rows[i] * F;
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) store(to + j, scales ? load(from + j) * load(scales + j) : load(from + j));
    for (; j < count; j++) to[j] = scales ? from[j] * scales[j] : from[j];
  }
}

// P panels from this one on for all rows, in blocks of kLeast to kMost; where fewer are left one takes the place of all P.
template <int P, int kLeast, int kMost, typename W>
static void columns(const Product<W>& of, int64_t panel, bool whole) {
  const int64_t begin = panel * kPanel, left = of.F - begin, own = (whole ? P : 1) * kPanel;
  Panels<W> w{of.w + begin * of.K, whole ? of.K * kPanel : 0, (int)of.K, 0, 0, 0, 0, 0};
  float sums[kGroup * P * kPanel];
  int64_t first = 0;
  for (int64_t groups = (of.M + kGroup - 1) / kGroup; groups > 0; groups--) {
    const int rows = (of.M - first + groups - 1) / groups;
    const int chunk = rows <= kMost ? of.K : kChunk;
    w.turns = (rows + kMost - 1) / kMost;
    w.ahead = w.turns == 1 ? kAhead / P : chunk;
    std::memset(sums, 0, sizeof(float) * rows * P * kPanel);
    for (w.begin = 0; w.begin < of.K; w.begin = w.end) {
      w.end = w.begin + chunk < of.K ? w.begin + chunk : of.K;
      int row = 0;
      for (w.turn = 0; w.turn < w.turns; w.turn++) {
        const int m = (rows - row + w.turns - w.turn - 1) / (w.turns - w.turn);
        block_of<P, kLeast>(m, of.x + (first + row) * of.K, of.K, w, sums + row * P * kPanel,
                            std::make_integer_sequence<int, kMost - kLeast + 1>());
        row += m;
      }
    }
    finish(sums, P * kPanel, rows, of.rows + first, of.scales ? of.scales + begin : nullptr, of.y + begin, of.F,
           left < own ? left : own);
    first += rows;
  }
}

template <int P, int kLeast, int kMost, typename W>
static void panels_of(const Product<W>& of, int64_t first, int64_t last) {
  for (; last - first >= P; first += P) columns<P, kLeast, kMost>(of, first, true);
  for (; first < last; first++) columns<P, kLeast, kMost>(of, first, false);
}

template <typename W>
static void product(ffi::ThreadPool& pool, const Product<W>& of) {
  constexpr int kFour = rows_for(4), kTwo = rows_for(2), kMost = rows_for(kWide);
  // Many rows are cut into blocks that are about alike.
  constexpr int kHalf = (kMost + 1) / 2, kLeast = kWide == 4 ? 1 : kTwo < kHalf ? kTwo + 1 : kHalf;
  const int64_t panels = (of.F + kPanel - 1) / kPanel, bytes = of.K * kPanel * sizeof(W);
  const int side = of.M <= kFour ? 4 : of.M <= kTwo ? 2 : kWide;
  const auto part = [=](int64_t first, int64_t last) {
    first *= side, last = last * side < panels ? last * side : panels;
    if constexpr (kFour > 0)
      if (of.M <= kFour) return panels_of<4, 1, kFour>(of, first, last);
    if (of.M <= kTwo) return panels_of<2, kFour + 1, kTwo>(of, first, last);
    panels_of<kWide, kLeast, kMost>(of, first, last);
  };
  const int64_t groups = (panels + side - 1) / side;
  const int64_t cost = panels * bytes / 4 * (of.M < 16 ? 4 : of.M / 4);  // bytes, or what the arithmetic takes meanwhile
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
static T* room(std::vector<T>& own, int64_t size) {
  if ((int64_t)own.size() < size) own.resize(size);
  return own.data();
}

// `live`: rows that count, of no elements where all do; the others are 0.
template <ffi::DataType kType, typename W>
static ffi::Error multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<kType> w, const float* scales,
                           ffi::Buffer<ffi::PRED> live, ffi::ResultBuffer<ffi::F32> y) {
  const auto xs = x.dimensions(), ws = w.dimensions(), ys = y->dimensions();
  if (!xs.size() || !ys.size()) return unfit("product: expected rows [.., K] and [.., F]");
  const int64_t K = xs[xs.size() - 1], F = ys[ys.size() - 1], all = count(xs, 0, xs.size() - 1);
  const bool some = live.element_count() > 0;
  if (ws.size() != 3 || ws[1] != K || ws[2] != kPanel || ws[0] != (F + kPanel - 1) / kPanel || !has(*y, all * F) ||
      !may_have(live, all) || K > INT32_MAX || all > INT32_MAX)
    return unfit("product: shapes do not fit");
  static thread_local std::vector<int32_t> own_rows;
  static thread_local std::vector<float> own_x;
  int32_t* rows = room(own_rows, all);
  int64_t M = 0;
  for (int64_t row = 0; row < all; row++) {
    if (!some || live.typed_data()[row]) rows[M++] = row;
    else std::memset(y->typed_data() + row * F, 0, sizeof(float) * F);
  }
  const float* from = x.typed_data();
  if (M < all) {
    float* packed = room(own_x, M * K);
    for (int64_t i = 0; i < M; i++) std::memcpy(packed + i * K, from + rows[i] * K, sizeof(float) * K);
    from = packed;
  }
  if (M && F) product<W>(pool, {from, rows, M, K, w.typed_data(), scales, y->typed_data(), F});
  return ffi::Error::Success();
}

static ffi::Error ProductF32(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> w, ffi::Buffer<ffi::PRED> live,
                             ffi::ResultBuffer<ffi::F32> y) {
  return multiply<ffi::F32, float>(pool, x, w, nullptr, live, y);
}

static ffi::Error ProductS8(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S8> w, ffi::Buffer<ffi::F32> scales,
                            ffi::Buffer<ffi::PRED> live, ffi::ResultBuffer<ffi::F32> y) {
  const auto ys = y->dimensions();
  if (!ys.size() || !has(scales, ys[ys.size() - 1])) return unfit("product: another number of scales than columns");
  return multiply<ffi::S8, int8_t>(pool, x, w, scales.typed_data(), live, y);
}

// -------------------------------------------------------------------------------------------------------------- attention

// e^x for x <= 0, within 2 units in the last place; 0 below −87.
static inline Vec exp_of(Vec x) {
  const Vec lowest = all(-87.0f);
  const Ints dead = x < lowest;
  x = dead ? lowest : x;
  const Vec shift = all(12582912.0f);  // 1.5 · 2^23: what is added to it is rounded to an integer
  const Vec n = (x * 1.44269504f + shift) - shift;
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

// One query over `live` keys and values, which lie `apart` values apart: out = Σ softmax(q · k / divisor + bias) v.
// `scores`: room for `live` + kLanes numbers.
static void attend(const float* q, const float* keys, const float* values, int64_t apart, int64_t live, int64_t K,
                   const float* bias, float divisor, float* scores, float* out) {
  const int64_t whole = K / kLanes * kLanes;
  float greatest = -INFINITY;
  for (int64_t s = 0; s < live; s++) {
    const float* key = keys + s * apart;
    // Too short a run for the processor to foresee: the next keys, and the values that are read when all scores are there.
    for (int64_t k = 0; k < K; k += 16) {
      __builtin_prefetch(key + kSlotsAhead * apart + k, 0, 3);
      __builtin_prefetch(values + s * apart + k, 0, 3);
    }
    Vec sums = {};
    for (int64_t k = 0; k < whole; k += kLanes) sums += load(q + k) * load(key + k);
    float score = sum_of(sums);
    for (int64_t k = whole; k < K; k++) score += q[k] * key[k];
    score = score / divisor + (bias ? bias[s] : 0.0f);
    greatest = score > greatest ? score : greatest;
    scores[s] = score;
  }
  for (int64_t s = live; s < live + kLanes; s++) scores[s] = -INFINITY;
  Vec totals = {};
  for (int64_t s = 0; s < live; s += kLanes) {
    const Vec e = exp_of(load(scores + s) - greatest);
    totals += e;
    store(scores + s, e);
  }
  // No slot, no output; a score that is not a number makes a total that is none.
  const float scale = live ? 1.0f / sum_of(totals) : 0.0f;
  const auto vectors = [&](int64_t k, auto count) __attribute__((always_inline)) {
    constexpr int kCount = decltype(count)::value;
    Vec sums[kCount] = {};
    for (int64_t s = 0; s < live; s++)
#pragma GCC unroll 4
      for (int j = 0; j < kCount; j++) sums[j] += scores[s] * load(values + s * apart + k + j * kLanes);
#pragma GCC unroll 4
    for (int j = 0; j < kCount; j++) store(out + k + j * kLanes, sums[j] * scale);
  };
  int64_t k = 0;
  for (; k + 4 * kLanes <= K; k += 4 * kLanes) vectors(k, std::integral_constant<int, 4>());
  for (; k + kLanes <= K; k += kLanes) vectors(k, std::integral_constant<int, 1>());
  for (; k < K; k++) {
    float sum = 0;
    for (int64_t s = 0; s < live; s++) sum += scores[s] * values[s * apart + k];
    out[k] = sum * scale;
  }
}

static float* room_for(int64_t scores) {
  static thread_local std::vector<float> own;
  return room(own, scores + kLanes);
}

// Whether a query is computed: `live [B, T]`, of no elements where all are. The output of the others is 0.
struct Live {
  const bool* of;
  int64_t T;
  bool operator()(int64_t b, int64_t t) const { return !of || of[b * T + t]; }
  static Live read(ffi::Buffer<ffi::PRED> live, int64_t T) { return {live.element_count() ? live.typed_data() : nullptr, T}; }
};

// f(row, head) for all of them; `each`: multiplications of one.
template <typename Do>
static void for_heads(ffi::ThreadPool& pool, int64_t B, int64_t H, int64_t each, const Do& f) {
  in_parallel(pool, B * H, 1 + (1 << 16) / (each + 1), B * H * each / (1 << 17), [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) f(i / H, i % H);
  });
}

// Writes keys and values of `qkv [B, T, 3·H·K]` to slots positions[b] .. of the caches `[B, H, S, K]`, in place, and attends to
// all slots up to each query's own. `bias [S, H, S]` by query position, or of no elements. Queries that are not live write
// nothing; those of a row that are come first.
static ffi::Error SelfAttention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> qkv, ffi::Buffer<ffi::F32> keys,
                                ffi::Buffer<ffi::F32> values, ffi::Buffer<ffi::F32> bias, ffi::Buffer<ffi::S32> positions,
                                ffi::Buffer<ffi::PRED> live, ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::F32> new_keys,
                                ffi::ResultBuffer<ffi::F32> new_values, float divisor) {
  const auto qs = qkv.dimensions(), cs = keys.dimensions();
  if (qs.size() != 3 || cs.size() < 3) return unfit("self-attention: expected queries [B, T, 3·H·K] and caches [.., H, S, K]");
  const int64_t B = qs[0], T = qs[1], K = cs[cs.size() - 1], S = cs[cs.size() - 2], H = cs[cs.size() - 3], width = H * K;
  const bool biased = bias.element_count() > 0;
  if (qs[2] != 3 * width || T > S || !has(keys, B * S * width) || !has(values, B * S * width) || !has(*new_keys, B * S * width) ||
      !has(*new_values, B * S * width) || !has(*out, B * T * width) || !may_have(bias, S * H * S) || !has(positions, B) ||
      !may_have(live, B * T))
    return unfit("self-attention: shapes do not fit");
  float *key = new_keys->typed_data(), *value = new_values->typed_data();
  if (key != keys.typed_data()) std::memcpy(key, keys.typed_data(), sizeof(float) * B * S * width);
  if (value != values.typed_data()) std::memcpy(value, values.typed_data(), sizeof(float) * B * S * width);
  const float *x = qkv.typed_data(), *table = bias.typed_data();
  const int32_t* begins = positions.typed_data();
  const Live counts = Live::read(live, T);
  float* y = out->typed_data();
  int64_t longest = 0;
  for (int64_t b = 0; b < B; b++) longest = begins[b] > longest ? begins[b] : longest;
  for_heads(pool, B, H, T * (longest + T) * K * 2, [=](int64_t b, int64_t h) {
    int64_t begin = begins[b] < S - T ? begins[b] : S - T;  // as XLA does with a slice that would reach past the end
    begin = begin < 0 ? 0 : begin;
    float *own_keys = key + (b * H + h) * S * K, *own_values = value + (b * H + h) * S * K;
    for (int64_t t = 0; t < T && counts(b, t); t++) {
      const float* from = x + (b * T + t) * 3 * width + h * K;
      std::memcpy(own_keys + (begin + t) * K, from + width, sizeof(float) * K);
      std::memcpy(own_values + (begin + t) * K, from + 2 * width, sizeof(float) * K);
    }
    float* scores = room_for(S);
    for (int64_t t = 0; t < T; t++) {
      const int64_t at = begin + t;
      float* to = y + (b * T + t) * width + h * K;
      if (!counts(b, t)) std::memset(to, 0, sizeof(float) * K);
      else
        attend(x + (b * T + t) * 3 * width + h * K, own_keys, own_values, K, at + 1, K,
               biased ? table + (at * H + h) * S : nullptr, divisor, scores, to);
    }
  });
  return ffi::Error::Success();
}

static inline int64_t within(int64_t length, int64_t most) { return length < 0 ? 0 : length < most ? length : most; }

// Queries [B, T, H·K] over the first lengths[b] of L keys and values [B, H, L, K].
static ffi::Error CrossAttention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> query, ffi::Buffer<ffi::F32> keys,
                                 ffi::Buffer<ffi::F32> values, ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::PRED> live,
                                 ffi::ResultBuffer<ffi::F32> out) {
  const auto qs = query.dimensions(), cs = keys.dimensions();
  if (qs.size() != 3 || cs.size() < 3) return unfit("cross-attention: expected queries [B, T, H·K] and keys [.., H, L, K]");
  const int64_t B = qs[0], T = qs[1], K = cs[cs.size() - 1], L = cs[cs.size() - 2], H = cs[cs.size() - 3], width = H * K;
  if (qs[2] != width || !has(keys, B * L * width) || !has(values, B * L * width) || !has(*out, B * T * width) ||
      !has(lengths, B) || !may_have(live, B * T))
    return unfit("cross-attention: shapes do not fit");
  const float *x = query.typed_data(), *key = keys.typed_data(), *value = values.typed_data();
  const int32_t* ends = lengths.typed_data();
  const Live counts = Live::read(live, T);
  float* y = out->typed_data();
  for_heads(pool, B, H, T * L * K * 2, [=](int64_t b, int64_t h) {
    const int64_t own = (b * H + h) * L * K;
    float* scores = room_for(L);
    for (int64_t t = 0; t < T; t++) {
      const int64_t at = (b * T + t) * width + h * K;
      if (!counts(b, t)) std::memset(y + at, 0, sizeof(float) * K);
      else attend(x + at, key + own, value + own, K, within(ends[b], L), K, nullptr, 1.0f, scores, y + at);
    }
  });
  return ffi::Error::Success();
}

// The first lengths[b] positions of qkv [B, L, 3·H·K] over each other, 0 for the others; bias [L, H, L] by query position.
static ffi::Error EncoderAttention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> qkv, ffi::Buffer<ffi::F32> bias,
                                   ffi::Buffer<ffi::S32> lengths, ffi::ResultBuffer<ffi::F32> out) {
  const auto qs = qkv.dimensions(), bs = bias.dimensions();
  if (qs.size() != 3 || bs.size() != 3) return unfit("encoder attention: expected queries [B, L, 3·H·K] and bias [L, H, L]");
  const int64_t B = qs[0], L = qs[1], H = bs[1], width = qs[2] / 3, K = H ? width / H : 0;
  if (bs[0] != L || bs[2] != L || K * H * 3 != qs[2] || !has(*out, B * L * width) || !has(lengths, B))
    return unfit("encoder attention: shapes do not fit");
  const float *x = qkv.typed_data(), *table = bias.typed_data();
  const int32_t* ends = lengths.typed_data();
  float* y = out->typed_data();
  for_heads(pool, B, H, L * L * K * 2, [=](int64_t b, int64_t h) {
    const float* own = x + b * L * 3 * width + h * K;
    float* scores = room_for(L);
    const int64_t live = within(ends[b], L);
    for (int64_t t = 0; t < L; t++) {
      float* to = y + (b * L + t) * width + h * K;
      if (t >= live) std::memset(to, 0, sizeof(float) * K);
      else attend(own + t * 3 * width, own + width, own + 2 * width, 3 * width, live, K, table + (t * H + h) * L, 1.0f, scores, to);
    }
  });
  return ffi::Error::Success();
}

// --------------------------------------------------------------------------------------------------------------- handlers

using Floats = ffi::Buffer<ffi::F32>;
using Integers = ffi::Buffer<ffi::S32>;
using Flags = ffi::Buffer<ffi::PRED>;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    SpecdecProductF32, ProductF32,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Floats>().Arg<Flags>().Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecProductS8, ProductS8,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<ffi::Buffer<ffi::S8>>()
                                  .Arg<Floats>().Arg<Flags>().Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecSelfAttention, SelfAttention,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Floats>().Arg<Floats>()
                                  .Arg<Floats>().Arg<Integers>().Arg<Flags>().Ret<Floats>().Ret<Floats>().Ret<Floats>()
                                  .Attr<float>("divisor"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecCrossAttention, CrossAttention,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Floats>().Arg<Floats>()
                                  .Arg<Integers>().Arg<Flags>().Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    SpecdecEncoderAttention, EncoderAttention,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Floats>().Arg<Integers>().Ret<Floats>());
