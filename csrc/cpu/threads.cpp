#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);

// True on a thread that runs a body: what it starts there it computes alone.
thread_local bool t_in_body = false;

void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until ready() or until kSpin has passed; returns what ready() last said.
template <class Ready>
bool spin_until(Ready ready) {
  const auto limit = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      cpu_relax();
    }
  } while (std::chrono::steady_clock::now() < limit);
  return ready();
}

class Pool {
 public:
  explicit Pool(int num_threads) : size_(num_threads) {
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { worker_main(); });
  }

  // Ends the workers; the object stays, for callers that still hold its address. The caller holds the pool and keeps it.
  void retire() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_.store(true);
      wake_.notify_all();
    }
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

  bool try_acquire() { return !busy_.exchange(true, std::memory_order_acquire); }
  void release() { busy_.store(false, std::memory_order_release); }

  // The caller holds the pool.
  void run(int64_t n, int64_t grain, RangeFn fn, void* context) {
    // Close the finished job before its fields change: a late worker that still reads it could otherwise take the new limit for
    // the old one and claim a block that is not there. The fields are released after the closing, and read before the claim.
    const uint64_t generation = state_.load(std::memory_order_relaxed) >> 32;
    state_.store(generation << 32 | kClosed, std::memory_order_seq_cst);
    fn_.store(fn, std::memory_order_release);
    context_.store(context, std::memory_order_release);
    n_.store(static_cast<uint32_t>(n), std::memory_order_release);
    grain_.store(static_cast<uint32_t>(grain), std::memory_order_release);
    done_.store(0, std::memory_order_release);
    const uint32_t next = static_cast<uint32_t>(generation) + 1;
    state_.store(static_cast<uint64_t>(next) << 32, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    t_in_body = true;
    work(next);
    t_in_body = false;
    wait_until_done(n);
  }

 private:
  uint32_t generation() const { return static_cast<uint32_t>(state_.load(std::memory_order_seq_cst) >> 32); }

  void worker_main() {
    t_in_body = true;
    uint32_t seen = 0;
    auto has_news = [&] { return generation() != seen || stop_.load(); };
    while (true) {
      if (!spin_until(has_news)) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, has_news);
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      }
      if (stop_.load()) return;
      seen = generation();
      work(seen);
    }
  }

  // Claims ranges of job `generation` until none is left. A claim compares generation and next block: it succeeds only if the job
  // whose fields were read is still the open one.
  void work(uint32_t generation) {
    uint64_t state = state_.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(state >> 32) == generation) {
      const int64_t begin = static_cast<uint32_t>(state);
      const RangeFn fn = fn_.load(std::memory_order_acquire);
      void* const context = context_.load(std::memory_order_acquire);
      const int64_t n = n_.load(std::memory_order_acquire), grain = grain_.load(std::memory_order_acquire);
      if (begin >= n) return;
      // Large claims first, small ones at the end to balance: a share of what is left, in whole grains.
      int64_t take = (n - begin) / (3 * size_) / grain * grain;
      if (take < grain) take = grain;
      if (take > n - begin) take = n - begin;
      if (!state_.compare_exchange_weak(state, state + static_cast<uint64_t>(take), std::memory_order_acq_rel,
                                        std::memory_order_acquire)) {
        continue;
      }
      fn(context, begin, begin + take);
      if (done_.fetch_add(take, std::memory_order_seq_cst) + take == n && caller_sleeps_.load(std::memory_order_seq_cst)) {
        std::lock_guard<std::mutex> lock(mutex_);
        finished_.notify_one();
      }
      state = state_.load(std::memory_order_acquire);
    }
  }

  void wait_until_done(int64_t n) {
    auto is_done = [&] { return done_.load(std::memory_order_seq_cst) == n; };
    if (spin_until(is_done)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    caller_sleeps_.store(true, std::memory_order_seq_cst);
    finished_.wait(lock, is_done);
    caller_sleeps_.store(false, std::memory_order_seq_cst);
  }

  static constexpr uint64_t kClosed = 0xffffffffu;  // as next block: beyond every job

  const int size_;  // workers and the caller
  alignas(64) std::atomic<uint64_t> state_{0};  // generation << 32 | next block
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<RangeFn> fn_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<uint32_t> n_{0}, grain_{1};
  std::atomic<bool> busy_{false}, stop_{false}, caller_sleeps_{false};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  std::vector<std::thread> workers_;
};

std::atomic<Pool*> g_pool{nullptr};
std::atomic<int> g_num_threads{1};
thread_local Pool* t_held = nullptr;  // by a session of this thread
std::mutex* g_create = new std::mutex;

// The child of a fork has none of the workers: forget the parent's pool (its memory stays, its threads do not exist).
void after_fork_in_child() {
  g_pool.store(nullptr);
  g_create = new std::mutex;
}

Pool* pool() {
  Pool* current = g_pool.load(std::memory_order_acquire);
  if (current != nullptr) return current;
  std::lock_guard<std::mutex> lock(*g_create);
  static const int registered = pthread_atfork(nullptr, nullptr, after_fork_in_child);
  (void)registered;
  current = g_pool.load(std::memory_order_acquire);
  if (current == nullptr) {
    current = new Pool(g_num_threads.load());
    g_pool.store(current, std::memory_order_release);
  }
  return current;
}

}  // namespace

void parallel_ranges(int64_t n, int64_t grain, RangeFn fn, void* context) {
  if (n <= 0) return;
  if (n <= grain || t_in_body || g_num_threads.load(std::memory_order_relaxed) == 1) return fn(context, 0, n);
  if (t_held != nullptr) return t_held->run(n, grain, fn, context);
  Pool* const p = pool();
  if (!p->try_acquire()) return fn(context, 0, n);
  p->run(n, grain, fn, context);
  p->release();
}

PoolSession::PoolSession() : holds_(false) {
  if (t_held != nullptr || t_in_body || g_num_threads.load(std::memory_order_relaxed) == 1) return;
  Pool* const p = pool();
  holds_ = p->try_acquire();
  if (holds_) t_held = p;
}

PoolSession::~PoolSession() {
  if (!holds_) return;
  t_held->release();
  t_held = nullptr;
}

void set_num_threads(int n) {
  std::lock_guard<std::mutex> lock(*g_create);
  if (n == g_num_threads.load()) return;
  g_num_threads.store(n);
  Pool* const old = g_pool.exchange(nullptr);
  if (old == nullptr) return;
  // Let a running job end. A caller that still holds the old address finds the pool busy for ever and computes alone.
  while (!old->try_acquire()) std::this_thread::yield();
  old->retire();
}

int num_threads() { return g_num_threads.load(); }

void* thread_scratch(size_t bytes) {
  struct Buffer {
    void* data = nullptr;
    size_t size = 0;
    ~Buffer() { std::free(data); }
  };
  static thread_local Buffer buffer;
  if (buffer.size < bytes) {
    std::free(buffer.data);
    buffer.size = (bytes + 4095) / 4096 * 4096;
    buffer.data = std::aligned_alloc(4096, buffer.size);
    if (buffer.data == nullptr) throw std::bad_alloc();
  }
  return buffer.data;
}

}  // namespace headrace
