// What the tests of the kernels share: buffers of exactly the size that is asked for, reproducible inputs, and the comparison of results
// between numbers of threads and instruction sets. For one file with a main.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../attention_plan.h"
#include "../dispatch.h"
#include "../quantized_call.h"
#include "../threads.h"

namespace headrace {
namespace {

int64_t g_passed = 0, g_failed = 0;

void expect(bool holds, const std::string& what) {
  ++(holds ? g_passed : g_failed);
  if (!holds) std::printf("FAILED: %s\n", what.c_str());
}

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// `count` elements, 64-byte aligned, no slack.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count) : count_(count) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, static_cast<size_t>(std::max<int64_t>(1, count)) * sizeof(T)) != 0) throw std::bad_alloc();
    data_.reset(static_cast<T*>(memory));
    std::memset(memory, 0, static_cast<size_t>(count) * sizeof(T));
  }
  T* get() const { return data_.get(); }
  T& operator[](int64_t i) const { return data_.get()[i]; }
  int64_t size() const { return count_; }
  std::vector<char> bytes() const {
    const char* first = reinterpret_cast<const char*>(get());
    return std::vector<char>(first, first + count_ * static_cast<int64_t>(sizeof(T)));
  }

 private:
  struct Free {
    void operator()(T* memory) const { std::free(memory); }
  };
  int64_t count_;
  std::unique_ptr<T, Free> data_;
};

// xorshift32 (Marsaglia, 2003): the same values in every run.
constexpr uint32_t kSeed = 2463534242u;
uint32_t g_random = kSeed;
uint32_t next_random() {
  g_random ^= g_random << 13;
  g_random ^= g_random >> 17;
  return g_random ^= g_random << 5;
}

Buffer<float> floats(int64_t count) {
  Buffer<float> out(count);
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(next_random() >> 8) / (1 << 23) - 1.0f;
  return out;
}

Buffer<uint16_t> bf16s(int64_t count) {
  const Buffer<float> source = floats(count);
  Buffer<uint16_t> out(count);
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &source[i], 4);
    out[i] = static_cast<uint16_t>(bits >> 16);
  }
  return out;
}

// Bytes that are small positive numbers as codes and as halves alike: a packed weight of any scheme.
Buffer<uint8_t> packed_bytes(int64_t count) {
  Buffer<uint8_t> out(count);
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<uint8_t>(0x20 + next_random() % 16);
  return out;
}

// FNV-1a (G. Fowler, L. C. Noll, K.-P. Vo, 1991).
uint64_t hash_of(const std::vector<char>& bytes, uint64_t hash) {
  for (const char byte : bytes) hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001b3u;
  return hash;
}

// Results of the instruction sets with a fused multiply-add: the first one's, in the order of the tests, and how many of them the present
// one has repeated.
std::vector<std::vector<char>> g_results;
size_t g_repeated = 0;
bool g_is_first = true;

// Floats that differ by the order of a sum of some hundred products of numbers below 1.
bool are_near(const std::vector<char>& a, const std::vector<char>& b) {
  bool near = a.size() == b.size();
  for (size_t i = 0; near && i < a.size(); i += 4) {
    float x, y;
    std::memcpy(&x, &a[i], 4);
    std::memcpy(&y, &b[i], 4);
    near = std::fabs(x - y) <= 2e-5f;
  }
  return near;
}

void expect_result_of_first(const std::string& what, const std::vector<char>& result, bool in_order) {
  if (std::strcmp(kernels().isa, "baseline") == 0) return;
  if (g_is_first) return g_results.push_back(result);
  const std::vector<char> none, &want = g_repeated < g_results.size() ? g_results[g_repeated] : none;
  expect(in_order ? want == result : are_near(want, result), what + ", the result of another instruction set");
  ++g_repeated;
}

// Runs `body`, which returns the bytes of its result, with one and more threads, and expects the same bytes. in_order: sums are added up
// in the order of the other instruction sets.
void same_for_any_threads(const std::string& what, const std::function<std::vector<char>()>& body, bool in_order = true) {
  set_num_threads(1);
  const std::vector<char> want = body();
  expect_result_of_first(std::string(kernels().isa) + " " + what, want, in_order);
  for (const int threads : {2, 3}) {
    set_num_threads(threads);
    expect(body() == want, std::string(kernels().isa) + " " + what + ", " + std::to_string(threads) + " threads");
  }
}

std::string shape(std::initializer_list<int64_t> sizes) {
  std::string out;
  for (const int64_t size : sizes) out += " " + std::to_string(size);
  return out;
}

}  // namespace
}  // namespace headrace
