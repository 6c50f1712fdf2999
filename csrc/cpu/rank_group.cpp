#include "rank_group.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "spin.h"
#include "threads.h"

namespace headrace {
namespace {

using Clock = std::chrono::steady_clock;
using Word = std::atomic<uint32_t>;

// Atomics are used by several processes at once, and a futex is 32 bits.
static_assert(Word::is_always_lock_free && sizeof(Word) == 4);

constexpr int64_t kSlotFloats = 1 << 16;     // of a sum or a gather
constexpr int64_t kBegunFloats = 1 << 20;    // of a sum that has begun; what goes beyond is summed when it ends
constexpr uint32_t kBegunSlots = 4;
constexpr int64_t kPartsFloats = 1 << 13;    // from here on each of three and more ranks adds up a part of a sum only
constexpr int64_t kMessageBytes = 64 << 10;  // of a piece of a message
constexpr uint32_t kMessageSlots = 8;
constexpr int64_t kGrain = 1 << 14;  // floats that a thread adds up or copies at once
constexpr int64_t kReasonBytes = 512;
constexpr int64_t kNapNs = 50'000'000;           // how long a rank sleeps before it looks around

// Whether the group can be used. kBreaking: somebody writes the reason.
enum State : uint32_t { kOpen, kBreaking, kBroken };

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

constexpr int64_t kMessageSlotBytes = round_up(kMessageBytes + static_cast<int64_t>(sizeof(int64_t)), 4096);

// Sleeps while the word is `seen`, for kNapNs at most, or for no reason.
void sleep_while(Word& word, uint32_t seen) {
  const timespec nap = {0, kNapNs};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &nap, nullptr, 0);
}

void wake_all(Word& word) { syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

int cores_of_this_process() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) return CPU_COUNT(&cores);
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void copy(const float* from, float* to, int64_t n) {
  parallel_for(n, kGrain, [=](int64_t begin, int64_t end) {
    std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin) * sizeof(float));
  });
}

void add(const float* __restrict a, const float* __restrict b, float* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
}

void add_to(const float* __restrict a, float* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] += a[i];
}

// out[n] = parts[0][n] + parts[1][n] + ..., in this order; two parts or more, none of which is out.
void add_up(const float* const* parts, int num_parts, float* out, int64_t n) {
  constexpr int64_t kBlock = 2048;  // stays in the first-level cache
  parallel_for(n, kGrain, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kBlock) {
      const int64_t count = std::min(kBlock, end - i);
      add(parts[0] + i, parts[1] + i, out + i, count);
      for (int part = 2; part < num_parts; ++part) add_to(parts[part] + i, out + i, count);
    }
  });
}

// A matrix some of whose elements are copied, counted row by row.
struct Rows {
  float* first;
  int64_t columns, stride;
};

// Copies elements [begin, begin + n) of the matrix into `flat` (put: out of it).
void copy_rows(const Rows& rows, int64_t begin, int64_t n, float* flat, bool put) {
  parallel_for(n, kGrain, [=](int64_t from, int64_t to) {
    while (from < to) {
      const int64_t row = (begin + from) / rows.columns, column = (begin + from) % rows.columns;
      const int64_t count = std::min(rows.columns - column, to - from);
      float* const there = rows.first + row * rows.stride + column;
      std::memcpy(put ? there : flat + from, put ? flat + from : there, static_cast<size_t>(count) * sizeof(float));
      from += count;
    }
  });
}

}  // namespace

// A number that grows, and how many sleep until it does. On cache lines of its own: two, since processors fetch them in pairs.
struct alignas(128) RankGroup::Signal {
  Word value, sleepers;

  // Compares so that numbers may overflow.
  bool has_come_to(uint32_t number) const { return static_cast<int32_t>(value.load(std::memory_order_acquire) - number) >= 0; }

  // What the caller wrote before is seen by whoever sees the number; what it read before was read. Either this load sees a sleeper, or the
  // sleeper sees the number before it sleeps: all four are in one order.
  void raise(uint32_t number) {
    value.store(number, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) > 0) wake_all(value);
  }

  void nap_unless(uint32_t number) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = value.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(seen - number) < 0) sleep_while(value, seen);
    sleepers.fetch_sub(1, std::memory_order_relaxed);
  }
};

// Numbers that one rank raises. taken: by rank 0, of this rank's pieces. added: elements of its pieces of sums, by slot; seen_ns: with a
// delay, when others see them. On the cache line of the number, which is read anyway.
struct RankGroup::Rank {
  template <int kSlots>
  struct Sums : Signal {
    static constexpr uint32_t kCount = kSlots;
    int64_t added[kSlots], seen_ns[kSlots];
  };
  Sums<2> met;
  Sums<kBegunSlots> begun;
  Signal gathered, taken, received;
};

struct RankGroup::Shared {
  alignas(128) Word state;
  std::atomic<int64_t> delay_ns;  // of sums
  char reason[kReasonBytes];
  Signal sent;
  Rank ranks[kMaxRanks];
};

int64_t RankGroup::bytes(int size) {
  if (size < 1 || size > kMaxRanks) {
    throw std::invalid_argument("a group of " + std::to_string(size) + " ranks: it has 1 to " + std::to_string(kMaxRanks));
  }
  const int64_t floats = int64_t{size} * (4 * kSlotFloats + kBegunSlots * kBegunFloats);
  return round_up(sizeof(Shared), 4096) + floats * static_cast<int64_t>(sizeof(float)) +
         kMessageSlots * kMessageSlotBytes;
}

RankGroup::RankGroup(void* memory, int rank, int size, double limit_s)
    : rank_(rank), size_(size), limit_(limit_s), num_cores_(cores_of_this_process()), shared_(static_cast<Shared*>(memory)) {
  bytes(size);  // throws
  if (rank < 0 || rank >= size) throw std::invalid_argument("rank " + std::to_string(rank) + " of a group of " + std::to_string(size) + ", counted from 0");
  if (!(limit_s > 0)) throw std::invalid_argument("the limit of a group must be above 0 s");
}

RankGroup::RankGroup(int fd, int rank, int size, double limit_s) : RankGroup(nullptr, rank, size, limit_s) {
  const int64_t needed = bytes(size);
  struct stat file;
  if (fstat(fd, &file) != 0 || file.st_size < needed) {
    throw std::invalid_argument("descriptor " + std::to_string(fd) + " has not the " + std::to_string(needed) + " bytes of a group of " +
                                std::to_string(size) + " ranks");
  }
  void* const memory = mmap(nullptr, static_cast<size_t>(needed), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) throw std::runtime_error(std::string("the memory of the group cannot be mapped: ") + std::strerror(errno));
  mapped_ = memory;
  shared_ = static_cast<Shared*>(memory);
}

RankGroup::~RankGroup() {
  if (mapped_ != nullptr) munmap(mapped_, static_cast<size_t>(bytes(size_)));
}

float* RankGroup::sum_slot(int rank, uint32_t piece) const {
  char* const slots = reinterpret_cast<char*>(shared_) + round_up(sizeof(Shared), 4096);
  return reinterpret_cast<float*>(slots) + (int64_t{rank} * 2 + piece % 2) * kSlotFloats;
}

// The last ones, behind the messages.
float* RankGroup::begun_slot(int rank, uint32_t piece) const {
  char* const slots = message_slot(0) + kMessageSlots * kMessageSlotBytes;
  return reinterpret_cast<float*>(slots) + (int64_t{rank} * kBegunSlots + piece % kBegunSlots) * kBegunFloats;
}

float* RankGroup::gather_slot(int rank, uint32_t piece) const { return sum_slot(size_ + rank, piece); }

char* RankGroup::message_slot(uint32_t piece) const {
  return reinterpret_cast<char*>(sum_slot(2 * size_, 0)) + piece % kMessageSlots * kMessageSlotBytes;
}

void RankGroup::check_open() const {
  if (shared_->state.load(std::memory_order_acquire) == kOpen) return;
  // The reason takes no time to write, unless its writer dies.
  const auto end = Clock::now() + std::chrono::nanoseconds(kNapNs);
  while (shared_->state.load(std::memory_order_acquire) != kBroken) {
    if (Clock::now() > end) throw std::runtime_error("a rank ended while it broke up the group");
    sched_yield();
  }
  throw std::runtime_error(shared_->reason);
}

void RankGroup::break_up(const char* reason) {
  uint32_t state = kOpen;
  if (!shared_->state.compare_exchange_strong(state, kBreaking)) return;
  size_t length = strnlen(reason, kReasonBytes);
  if (length == kReasonBytes) {
    for (--length; length > 0 && (reason[length] & 0xC0) == 0x80;) --length;  // no part of a UTF-8 character
  }
  std::memcpy(shared_->reason, reason, length);
  shared_->reason[length] = 0;
  shared_->state.store(kBroken, std::memory_order_seq_cst);
  wake_all(shared_->sent.value);
  for (Rank& rank : shared_->ranks) {
    Signal *const met = &rank.met, *const begun = &rank.begun;
    for (Signal* signal : {met, begun, &rank.gathered, &rank.taken, &rank.received}) wake_all(signal->value);
  }
}

// Until the number of rank `whose` has come. Spinning must not keep the awaited rank from its core where there are more threads than cores.
void RankGroup::wait(Signal& signal, uint32_t number, int whose, Limit limit) {
  if (signal.has_come_to(number)) return;
  const auto begin = Clock::now();
  const bool is_crowded = num_cores_ < size_ * num_threads();
  const bool has_come_soon = spin_until(
      [&] { return signal.has_come_to(number) || shared_->state.load(std::memory_order_relaxed) != kOpen; },
      [&] {
        if (is_crowded) sched_yield();
      });
  if (has_come_soon && signal.has_come_to(number)) return;
  while (!signal.has_come_to(number)) {
    check_open();
    if (limit == Limit::kOurs && Clock::now() - begin > limit_) {
      char reason[80];
      std::snprintf(reason, sizeof reason, "rank %d did not answer within %g s", whose, limit_.count());
      break_up(reason);
      check_open();
    }
    signal.nap_unless(number);
  }
}

// Returns when every rank has come here as often as this one. Then all see what each wrote before.
void RankGroup::meet() {
  const uint32_t number = ++num_meetings_;
  shared_->ranks[rank_].met.raise(number);
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_) wait(shared_->ranks[rank].met, number, rank);
  }
}

// Pieces use two slots in turn, and no rank says that it has read one: who writes piece k + 2 into the slot of piece k has met the others in
// piece k + 1, and none comes there before it has read what it needs of piece k.
void RankGroup::all_reduce(float* x, int64_t n) {
  check_open();
  if (n < 0) throw std::invalid_argument("all_reduce: " + std::to_string(n) + " elements");
  if (size_ == 1) return;
  for (int64_t begin = 0; begin < n; begin += kSlotFloats) {
    const int64_t count = std::min(kSlotFloats, n - begin);
    size_ == 2 || count < kPartsFloats ? sum_directly(x + begin, count) : sum_in_parts(x + begin, count);
  }
}

void RankGroup::delay_sums(double seconds) { shared_->delay_ns.store(static_cast<int64_t>(seconds * 1e9), std::memory_order_relaxed); }

// Says what lies in the own slot of this piece.
template <class Sums>
void RankGroup::note(Sums& own, uint32_t piece, int64_t n) const {
  const int64_t delay_ns = shared_->delay_ns.load(std::memory_order_relaxed);
  const uint32_t slot = piece % Sums::kCount;
  own.added[slot] = n;
  own.seen_ns[slot] = delay_ns > 0 ? std::chrono::nanoseconds(Clock::now().time_since_epoch()).count() + delay_ns : 0;
}

// Looks at what the others have put into this piece. Ranks that add up different sizes are not in the same call: their sum would be wrong in silence.
template <class Sums>
void RankGroup::take(Sums Rank::*sums, uint32_t piece, int64_t n) {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    const Sums& there = shared_->ranks[rank].*sums;
    const int64_t theirs = there.added[piece % Sums::kCount];
    if (theirs != n) {
      char reason[120];
      std::snprintf(reason, sizeof reason, "ranks %d and %d disagree about a step: one adds up %lld numbers, the other %lld", rank_, rank,
                    static_cast<long long>(n), static_cast<long long>(theirs));
      break_up(reason);
      check_open();
    }
    const int64_t seen_ns = there.seen_ns[piece % Sums::kCount];
    if (seen_ns > 0) std::this_thread::sleep_until(Clock::time_point(std::chrono::nanoseconds(seen_ns)));
  }
}

// Meets the others with x[n] in a slot.
uint32_t RankGroup::put_in(const float* x, int64_t n) {
  const uint32_t piece = num_sums_++;
  copy(x, sum_slot(rank_, piece), n);
  note(shared_->ranks[rank_].met, piece, n);
  meet();
  take(&Rank::met, piece, n);
  return piece;
}

// A rank that begins sum k has finished k - 2, so it has seen that every other has begun k - 2, after it finished k - 4: nobody reads the slot.
void RankGroup::begin_sum(const float* x, int64_t n) {
  check_open();
  const uint32_t num_open = num_begun_ - num_finished_;
  if (n < 0 || num_open > 1) {
    throw std::invalid_argument("begin_sum: " + std::to_string(n) + " elements, and " + std::to_string(num_open) + " sums have begun");
  }
  const uint32_t piece = num_begun_++;
  Rank& own = shared_->ranks[rank_];
  if (size_ > 1) copy(x, begun_slot(rank_, piece), std::min(n, kBegunFloats));
  note(own.begun, piece, n);
  own.begun.raise(num_begun_);
}

void RankGroup::finish_sum(float* x, int64_t n) {
  check_open();
  if (num_begun_ == num_finished_) throw std::invalid_argument("finish_sum: no sum has begun");
  const uint32_t piece = num_finished_++;
  if (size_ == 1) return;
  const float* slots[kMaxRanks];
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_) wait(shared_->ranks[rank].begun, num_finished_, rank);
    slots[rank] = begun_slot(rank, piece);
  }
  take(&Rank::begun, piece, n);
  const int64_t count = std::min(n, kBegunFloats);
  add_up(slots, size_, x, count);
  if (n > count) all_reduce(x + count, n - count);
}

// Each rank adds up everything.
void RankGroup::sum_directly(float* x, int64_t n) {
  const uint32_t piece = put_in(x, n);
  const float* slots[kMaxRanks];
  for (int rank = 0; rank < size_; ++rank) slots[rank] = sum_slot(rank, piece);
  add_up(slots, size_, x, n);
}

// Each rank adds up its part and puts the sum into its slot, where nobody else reads that part before; then all take the others' sums.
void RankGroup::sum_in_parts(float* x, int64_t n) {
  auto start = [&](int rank) { return std::min(n, round_up((n + size_ - 1) / size_, 16) * rank); };
  const uint32_t piece = put_in(x, n);
  const int64_t begin = start(rank_), count = start(rank_ + 1) - begin;
  const float* parts[kMaxRanks];
  for (int rank = 0; rank < size_; ++rank) parts[rank] = sum_slot(rank, piece) + begin;
  add_up(parts, size_, x + begin, count);
  copy(x + begin, sum_slot(rank_, piece) + begin, count);
  meet();
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_) copy(sum_slot(rank, piece) + start(rank), x + start(rank), start(rank + 1) - start(rank));
  }
}

void RankGroup::gather(const float* x, int64_t x_stride, int64_t rows, const int64_t* columns, float* out, int64_t out_stride) {
  check_open();
  int64_t starts[kMaxRanks + 1] = {0};
  for (int rank = 0; rank < size_; ++rank) {
    if (columns[rank] < 0) throw std::invalid_argument("gather: rank " + std::to_string(rank) + " has " + std::to_string(columns[rank]) + " columns");
    starts[rank + 1] = starts[rank] + columns[rank];
  }
  if (rows < 0 || (rows > 1 && (x_stride < columns[rank_] || (rank_ == 0 && out_stride < starts[size_])))) {
    throw std::invalid_argument("gather: " + std::to_string(rows) + " rows of " + std::to_string(columns[rank_]) + " of " +
                                std::to_string(starts[size_]) + " columns, strides " + std::to_string(x_stride) + " and " +
                                std::to_string(out_stride));
  }
  if ((rank_ == 0) != (out != nullptr) && rows * starts[size_] > 0) throw std::invalid_argument("gather: rank 0 alone has an output");
  if (rank_ != 0) {
    const Rows own = {const_cast<float*>(x), columns[rank_], x_stride};
    Rank& shared = shared_->ranks[rank_];
    for (int64_t begin = 0; begin < rows * own.columns; begin += kSlotFloats) {
      const uint32_t number = ++num_gathered_[rank_];
      wait(shared.taken, number - 2, 0);  // rank 0 has read what lies in the slot
      copy_rows(own, begin, std::min(kSlotFloats, rows * own.columns - begin), gather_slot(rank_, number), false);
      shared.gathered.raise(number);
    }
    return;
  }
  for (int64_t row = 0; row < rows; ++row) copy(x + row * x_stride, out + row * out_stride, columns[0]);
  bool is_done = false;
  for (int64_t begin = 0; !is_done; begin += kSlotFloats) {
    is_done = true;
    for (int rank = 1; rank < size_; ++rank) {
      const int64_t left = rows * columns[rank] - begin;
      if (left <= 0) continue;
      is_done = false;
      Rank& shared = shared_->ranks[rank];
      const uint32_t number = ++num_gathered_[rank];
      wait(shared.gathered, number, rank);
      copy_rows({out + starts[rank], columns[rank], out_stride}, begin, std::min(kSlotFloats, left), gather_slot(rank, number), true);
      shared.taken.raise(number);
    }
  }
}

// Each piece has the size of the whole message in front, so whoever takes a piece knows how many follow.
void RankGroup::send(const char* data, int64_t size) {
  check_open();
  if (rank_ != 0 || size < 0) throw std::invalid_argument("send: " + std::to_string(size) + " bytes from rank " + std::to_string(rank_));
  int64_t begin = 0;
  do {
    const int64_t count = std::min(kMessageBytes, size - begin);
    const uint32_t number = ++num_messages_;
    for (int rank = 1; rank < size_; ++rank) wait(shared_->ranks[rank].received, number - kMessageSlots, rank);
    char* const slot = message_slot(number);
    std::memcpy(slot, &size, sizeof size);
    if (count > 0) std::memcpy(slot + sizeof size, data + begin, static_cast<size_t>(count));
    shared_->sent.raise(number);
    begin += count;
  } while (begin < size);
}

int64_t RankGroup::receive(std::string& into) {
  check_open();
  if (rank_ == 0) throw std::invalid_argument("receive: rank 0 sends");
  int64_t begin = 0, size = 0;
  do {
    const uint32_t number = ++num_messages_;
    wait(shared_->sent, number, 0, begin == 0 ? Limit::kNone : Limit::kOurs);
    const char* const slot = message_slot(number);
    std::memcpy(&size, slot, sizeof size);
    if (begin == 0) into.resize(static_cast<size_t>(size));
    const int64_t count = std::min(kMessageBytes, size - begin);
    if (count > 0) std::memcpy(&into[static_cast<size_t>(begin)], slot + sizeof size, static_cast<size_t>(count));
    shared_->ranks[rank_].received.raise(number);
    begin += count;
  } while (begin < size);
  return size;
}

}  // namespace headrace
