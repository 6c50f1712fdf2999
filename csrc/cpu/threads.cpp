#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "seat.h"
#include "spin.h"

namespace headrace {
namespace {

// How long a caller that sleeps waits for a worker before it lends it its core: others want a core for less than this, or for a whole slice.
constexpr auto kPatience = std::chrono::microseconds(500);

// True on a thread that runs a body: what it starts there it computes alone.
thread_local bool t_in_body = false;

class Pool {
 public:
  explicit Pool(int num_threads)
      : size_(num_threads),
        shares_(new Share[static_cast<size_t>(num_threads)]),
        seats_(new Seat[static_cast<size_t>(num_threads)]) {
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] { worker_main(i); });
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
    if (grain < 1) grain = 1;
    if ((n + grain - 1) / grain > kMaxUnits) grain = (n + kMaxUnits - 1) / kMaxUnits;
    const int64_t units = (n + grain - 1) / grain;
    // Close the finished job before its fields change: a late worker that still reads it could otherwise take the new limit for
    // the old one and claim a block that is not there. The fields are released after the closing, and read before the claim.
    const uint32_t before = generation_.load(std::memory_order_relaxed), next = (before + 1) & kMaxGeneration;
    for (int i = 0; i < size_; ++i) shares_[i].state.store(pack(before, 0, 0), std::memory_order_seq_cst);
    fn_.store(fn, std::memory_order_release);
    context_.store(context, std::memory_order_release);
    n_.store(n, std::memory_order_release);
    grain_.store(grain, std::memory_order_release);
    done_.store(0, std::memory_order_release);
    for (int i = 0; i < size_; ++i) {
      shares_[i].state.store(pack(next, units * i / size_, units * (i + 1) / size_), std::memory_order_seq_cst);
    }
    generation_.store(next, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    t_in_body = true;
    work(next, 0);
    t_in_body = false;
    wait_until_done(n);
  }

  // See expect_reads.
  void expect(const void* memory, int64_t bytes) {
    next_bytes_.store(bytes, std::memory_order_relaxed);
    next_memory_.store(static_cast<const char*>(memory), std::memory_order_release);
  }

 private:
  // A thread's part of the job in units of the grain: its owner takes from the front, so that it reads one stretch of memory, the
  // others from the back once they have done their own.
  struct alignas(64) Share {
    std::atomic<uint64_t> state{0};  // generation << 40 | begin << 20 | end
  };
  static constexpr int kUnitBits = 20;
  static constexpr int64_t kMaxUnits = (int64_t{1} << kUnitBits) - 1;
  static constexpr uint32_t kMaxGeneration = (1u << 24) - 1;

  static uint64_t pack(uint32_t generation, int64_t begin, int64_t end) {
    return static_cast<uint64_t>(generation) << (2 * kUnitBits) | static_cast<uint64_t>(begin) << kUnitBits |
           static_cast<uint64_t>(end);
  }

  // What a waiting thread may fetch: the start of its share of the memory that the caller expects to be read next.
  class Fetcher {
   public:
    Fetcher(const Pool& pool, int index) : pool_(pool), index_(index) {}
    void step() {
      const char* const memory = pool_.next_memory_.load(std::memory_order_acquire);
      const int64_t bytes = pool_.next_bytes_.load(std::memory_order_relaxed);
      if (memory != memory_) {
        memory_ = memory;
        at_ = bytes * index_ / pool_.size_;
        end_ = bytes * (index_ + 1) / pool_.size_;
        if (end_ > at_ + kFetchBytes) end_ = at_ + kFetchBytes;
      }
      for (int i = 0; i < 8 && at_ < end_; ++i, at_ += 64) __builtin_prefetch(memory_ + at_, 0, 2);
    }

   private:
    static constexpr int64_t kFetchBytes = 256 << 10;  // a part of the second-level cache
    const Pool& pool_;
    const int index_;
    const char* memory_ = nullptr;
    int64_t at_ = 0, end_ = 0;
  };

  void worker_main(int index) {
    t_in_body = true;
    seats_[index].take();
    uint32_t seen = 0;
    Fetcher fetcher(*this, index);
    auto has_news = [&] { return generation_.load(std::memory_order_seq_cst) != seen || stop_.load(); };
    while (true) {
      if (!spin_until(has_news, [&] { fetcher.step(); })) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, has_news);
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      }
      if (stop_.load()) return;
      seen = generation_.load(std::memory_order_seq_cst);
      seats_[index].begin();
      work(seen, index);
      seats_[index].end();
    }
  }

  // Claims of job `generation` until none is left: of the thread's own share, then of the others'.
  void work(uint32_t generation, int index) {
    for (int i = 0; i < size_; ++i) {
      while (claim(generation, (index + i) % size_, i == 0)) {
      }
    }
  }

  // Claims and runs a part of a share; false when it is empty. A claim compares generation, begin and end: it succeeds only if the
  // job whose fields were read is still the open one.
  bool claim(uint32_t generation, int share, bool own) {
    std::atomic<uint64_t>& state = shares_[share].state;
    uint64_t seen = state.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(seen >> (2 * kUnitBits)) == generation) {
      const int64_t begin = static_cast<int64_t>(seen >> kUnitBits) & kMaxUnits, end = static_cast<int64_t>(seen) & kMaxUnits;
      if (begin >= end) return false;
      const RangeFn fn = fn_.load(std::memory_order_acquire);
      void* const context = context_.load(std::memory_order_acquire);
      const int64_t n = n_.load(std::memory_order_acquire), grain = grain_.load(std::memory_order_acquire);
      // Large claims first, small ones at the end to balance.
      const int64_t take = (end - begin + 3) / 4;
      const int64_t first = own ? begin : end - take;
      const uint64_t rest = own ? pack(generation, begin + take, end) : pack(generation, begin, end - take);
      if (!state.compare_exchange_weak(seen, rest, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      const int64_t from = first * grain, to = (first + take) * grain < n ? (first + take) * grain : n;
      fn(context, from, to);
      if (done_.fetch_add(to - from, std::memory_order_seq_cst) + to - from == n &&
          caller_sleeps_.load(std::memory_order_seq_cst)) {
        std::lock_guard<std::mutex> lock(mutex_);
        finished_.notify_one();
      }
      return true;
    }
    return false;
  }

  void wait_until_done(int64_t n) {
    auto is_done = [&] { return done_.load(std::memory_order_seq_cst) == n; };
    if (spin_until(is_done, [&] { fetcher_.step(); })) return;
    std::unique_lock<std::mutex> lock(mutex_);
    caller_sleeps_.store(true, std::memory_order_seq_cst);
    if (!finished_.wait_for(lock, kPatience, is_done)) {
      for (int i = 1; i < size_ && !seats_[i].lend_core(); ++i) {
      }
      finished_.wait(lock, is_done);
    }
    caller_sleeps_.store(false, std::memory_order_seq_cst);
  }

  const int size_;  // workers and the caller
  const std::unique_ptr<Share[]> shares_;
  const std::unique_ptr<Seat[]> seats_;  // of the workers; the caller has none
  Fetcher fetcher_{*this, 0};  // the caller's
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<RangeFn> fn_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<int64_t> n_{0}, grain_{1};
  std::atomic<const char*> next_memory_{nullptr};
  std::atomic<int64_t> next_bytes_{0};
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

void expect_reads(const void* memory, int64_t bytes) {
  if (t_held != nullptr) t_held->expect(memory, bytes);
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

void* thread_scratch(size_t bytes, Scratch purpose) {
  struct Buffer {
    void* data = nullptr;
    size_t size = 0;
    ~Buffer() { std::free(data); }
  };
  static thread_local Buffer buffers[5];
  Buffer& buffer = buffers[static_cast<int>(purpose)];
  if (buffer.size < bytes) {
    std::free(buffer.data);
    buffer.size = (bytes + 4095) / 4096 * 4096;
    buffer.data = std::aligned_alloc(4096, buffer.size);
    if (buffer.data == nullptr) throw std::bad_alloc();
  }
  return buffer.data;
}

}  // namespace headrace
