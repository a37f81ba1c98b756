// Products of a few rows with a weight matrix stored as panels of 16 columns, for XLA's FFI on a CPU.
//   y [M, F] = x [M, K] · w [F/16, K, 16],   w float32, or int8 with a float32 scale for each column.
// The sum of an output runs over k = 0 .. K-1 in one chain of fused multiply-adds: a row's bits do not depend on M, on
// the number of threads, nor on which thread computed it.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

#if defined(__AVX512F__)
constexpr int kLanes = 16, kMost = 6;
#elif defined(__AVX__)
constexpr int kLanes = 8, kMost = 6;
#else
constexpr int kLanes = 4, kMost = 4;
#endif
constexpr int kPanel = 16, kParts = kPanel / kLanes;
constexpr int kAhead = 64;  // lines (of one k) in a chunk; the next chunk is prefetched while this one is used

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef float VecU __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef int8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));

static inline Vec load(const float* p) { return *reinterpret_cast<const VecU*>(p); }
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

// One panel, rows x .. x + M - 1, lines begin .. end - 1: sums += x · w. `ahead`: what to prefetch, `step` bytes per line.
template <int M, typename W>
static inline __attribute__((always_inline)) void lines(const float* x, int64_t K, const W* w, int begin, int end,
                                                        const char* ahead, int step, Vec (&sums)[M][kParts]) {
  constexpr int kUnroll = 64 / (kPanel * sizeof(W));  // lines in 64 bytes
  auto one = [&](int k) __attribute__((always_inline)) {
    Vec u[kParts];
#pragma GCC unroll 16
    for (int p = 0; p < kParts; p++) u[p] = load(w + (int64_t)k * kPanel + p * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < M; i++) {
      Vec s = x[i * K + k] - Vec{};
#pragma GCC unroll 16
      for (int p = 0; p < kParts; p++) sums[i][p] += s * u[p];
    }
  };
  int k = begin;
  for (; k + kUnroll <= end; k += kUnroll) {
    __builtin_prefetch(ahead, 0, 3);
    ahead += step;
#pragma GCC unroll 4
    for (int j = 0; j < kUnroll; j++) one(k + j);
  }
  for (; k < end; k++) one(k);
}

template <int M, typename W>
static __attribute__((noinline)) void block(const float* x, int64_t K, const W* w, int begin, int end, const char* ahead,
                                            int step, float* partial, float* y, int64_t F, const float* scales) {
  Vec sums[M][kParts];
#pragma GCC unroll 16
  for (int i = 0; i < M; i++)
#pragma GCC unroll 16
    for (int p = 0; p < kParts; p++) sums[i][p] = begin ? load(partial + i * kPanel + p * kLanes) : Vec{};
  lines<M, W>(x, K, w, begin, end, ahead, step, sums);
  if (end == K) {
#pragma GCC unroll 16
    for (int i = 0; i < M; i++)
#pragma GCC unroll 16
      for (int p = 0; p < kParts; p++) {
        Vec v = sums[i][p];
        if (scales) v *= load(scales + p * kLanes);
        *reinterpret_cast<VecU*>(y + i * F + p * kLanes) = v;
      }
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < M; i++)
#pragma GCC unroll 16
      for (int p = 0; p < kParts; p++) *reinterpret_cast<VecU*>(partial + i * kPanel + p * kLanes) = sums[i][p];
  }
}

template <typename W>
using Block = void (*)(const float*, int64_t, const W*, int, int, const char*, int, float*, float*, int64_t, const float*);
template <typename W>
static const Block<W> kBlocks[] = {nullptr,     block<1, W>, block<2, W>, block<3, W>,
                                   block<4, W>, block<5, W>, block<6, W>};

// Panels first .. last - 1 of the product.
template <typename W>
static void panels(const float* x, int64_t M, int64_t K, const W* w, const float* scales, float* y, int64_t F,
                   int64_t first, int64_t last) {
  const int blocks = (M + kMost - 1) / kMost;
  float partial[64 * kPanel];
  const int chunk = blocks == 1 ? K : kAhead * 4 / (int)sizeof(float) * 1;
  const int step = 64 / blocks + (64 % blocks != 0);
  for (int64_t f = first; f < last; f++) {
    const W* panel = w + f * K * kPanel;
    for (int begin = 0; begin < K; begin += chunk) {
      const int end = begin + chunk < K ? begin + chunk : K;
      const char* next = reinterpret_cast<const char*>(panel + (int64_t)(blocks == 1 ? begin : end) * kPanel);
      if (blocks == 1) next += 64 * 32;  // 2 KiB ahead
      int64_t row = 0;
      for (int b = 0; b < blocks; b++) {
        const int m = (M - row + blocks - b - 1) / (blocks - b);
        kBlocks<W>[m](x + row * K, K, panel, begin, end, next, step, partial + row * kPanel, y + row * F + f * kPanel, F,
                      scales ? scales + f * kPanel : nullptr);
        next += (int64_t)step * ((end - begin) * kPanel * (int)sizeof(W) / 64);
        row += m;
      }
    }
  }
}

// What the threads of a product share. A helper that comes too late finds no panels left and touches nothing else, so that
// the caller waits only for helpers at work: a pool whose threads are all callers cannot lock up.
struct Shared {
  std::atomic<int64_t> next{0}, done{0};
  int64_t total, grain;
};

template <typename Do>
static void work(Shared& s, const Do& f) {
  for (;;) {
    const int64_t first = s.next.fetch_add(s.grain, std::memory_order_relaxed);
    if (first >= s.total) return;
    const int64_t last = first + s.grain < s.total ? first + s.grain : s.total;
    f(first, last);
    s.done.fetch_add(last - first, std::memory_order_release);
  }
}

static inline void pause_() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <typename W>
static void product(ffi::ThreadPool* pool, int64_t threads, const float* x, int64_t M, int64_t K, const W* w,
                    const float* scales, float* y, int64_t F) {
  const int64_t total = F / kPanel, bytes = K * kPanel * sizeof(W);
  if (!pool || threads < 2 || total * bytes < (128 << 10)) return panels<W>(x, M, K, w, scales, y, F, 0, total);
  int64_t grain = (128 << 10) / bytes;
  if (grain > total / (2 * threads)) grain = total / (2 * threads);
  if (grain < 1) grain = 1;
  auto shared = std::make_shared<Shared>();
  shared->total = total;
  shared->grain = grain;
  auto f = [=](int64_t first, int64_t last) { panels<W>(x, M, K, w, scales, y, F, first, last); };
  for (int64_t t = 1; t < threads; t++) pool->Schedule([shared, f] { work(*shared, f); });
  work(*shared, f);
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < total;)
    ++spins < 20000 ? pause_() : std::this_thread::yield();
}

static ffi::Error check(int64_t M, int64_t K, int64_t kw, int64_t panel, int64_t F, int64_t n) {
  if (panel != kPanel || kw != K || n * kPanel != F || M > 64)
    return ffi::Error::InvalidArgument("product: shapes do not fit");
  return ffi::Error::Success();
}

static ffi::Error F32(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> w,
                      ffi::ResultBuffer<ffi::F32> y, int64_t threads) {
  auto xs = x.dimensions(), ws = w.dimensions(), ys = y->dimensions();
  if (auto e = check(xs[0], xs[1], ws[1], ws[2], ys[1], ws[0]); e.failure()) return e;
  const float* p = w.typed_data();
  product<float>(&pool, threads, x.typed_data(), xs[0], xs[1], p, nullptr, y->typed_data(), ys[1]);
  return ffi::Error::Success();
}

static ffi::Error S8(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S8> w, ffi::Buffer<ffi::F32> scales,
                     ffi::ResultBuffer<ffi::F32> y, int64_t threads) {
  auto xs = x.dimensions(), ws = w.dimensions(), ys = y->dimensions();
  if (auto e = check(xs[0], xs[1], ws[1], ws[2], ys[1], ws[0]); e.failure()) return e;
  product<int8_t>(&pool, threads, x.typed_data(), xs[0], xs[1], w.typed_data(), scales.typed_data(), y->typed_data(), ys[1]);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecProductF32, F32,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>().Attr<int64_t>("threads"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecdecProductS8, S8,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S8>>().Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>().Attr<int64_t>("threads"));
