// What the ranks of one host tell each other: sums over all, parts put side by side, and messages, through memory that their processes share.
//
// A rank is a process (or, in tests, a thread) with a part of the model; rank 0 leads. All ranks make the same calls in the same order. Sums,
// gathers and messages each have memory of their own, so calls of different kinds do not meet: a rank may use another thread for each kind,
// one thread at a time. Whoever waits spins briefly, then sleeps. A group that has been broken up stays so; its ranks make a new one.
//
// The memory is a header and then slots, two or more for each rank and kind; all zero is the state at the start, and each rank joins once. Who
// has written a slot raises a number of its own; the others wait for that number. A number is written by one rank alone, and compared so that
// it may overflow.
#pragma once
#include <chrono>
#include <cstdint>
#include <string>

namespace headrace {

class RankGroup {
 public:
  static constexpr int kMaxRanks = 64;

  // Of memory that a group of `size` ranks shares. Only what is used takes memory of the machine.
  static int64_t bytes(int size);

  // Joins the group whose memory is the file `fd` (memfd_create), of at least bytes(size) bytes; fd may be closed afterwards. limit_s: how long
  // a call waits for another rank. Throws std::invalid_argument when an argument does not fit, std::runtime_error when the memory cannot be mapped.
  RankGroup(int fd, int rank, int size, double limit_s);
  // The same in memory that somebody else has mapped and keeps: for ranks that are threads of one process. Aligned to 128 bytes.
  RankGroup(void* memory, int rank, int size, double limit_s);
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Every call below throws std::runtime_error with the reason when the group is or gets broken up, std::invalid_argument when an argument
  // does not fit. One that waits for another rank for longer than the limit breaks the group up.

  // x[n] becomes the sum of every rank's x, added in the order of ranks: the same bits in each rank, whatever comes first. Ranks that give
  // different n break the group up.
  void all_reduce(float* x, int64_t n);

  // all_reduce in two calls, with the same bits: the first hands x out and does not wait, the second waits. Between the two this rank computes
  // something else. Two sums may have begun at a time; they end in the order in which they began, each with the x and n it began with.
  void begin_sum(const float* x, int64_t n);
  void finish_sum(float* x, int64_t n);
  uint32_t num_begun() const { return num_begun_; }

  // For tests: what a rank gives to a sum is seen by the others this much later, as over a network. By one rank for all, between sums.
  void delay_sums(double seconds);

  // Rank r has x [rows, columns[r]], rows x_stride apart; rank 0's out [rows, sum of columns], rows out_stride apart, gets them side by side.
  // The others pass null for out, and may return before rank 0 has read their part.
  void gather(const float* x, int64_t x_stride, int64_t rows, const int64_t* columns, float* out, int64_t out_stride);

  // Rank 0: a message to all others. Returns when it lies in the shared memory, some 512 KB of which may still wait to be received.
  void send(const char* data, int64_t size);
  // The others: each receives every message, in order. Returns its bytes. The wait for a message to begin has no limit, and uses no processor time.
  int64_t receive(std::string& into);

  // Ends every wait in every rank, now and later. May be called by any thread; the first reason stays.
  void break_up(const char* reason);

 private:
  struct Signal;
  struct Rank;
  struct Shared;
  enum class Limit { kOurs, kNone };

  void check_open() const;
  void wait(Signal& signal, uint32_t number, int whose, Limit limit = Limit::kOurs);
  void meet();
  uint32_t put_in(const float* x, int64_t n);
  template <class Sums>
  void note(Sums& own, uint32_t piece, int64_t n) const;
  template <class Sums>
  void take(Sums Rank::*sums, uint32_t piece, int64_t n);
  void sum_directly(float* x, int64_t n);
  void sum_in_parts(float* x, int64_t n);
  float* sum_slot(int rank, uint32_t piece) const;
  float* begun_slot(int rank, uint32_t piece) const;
  float* gather_slot(int rank, uint32_t piece) const;
  char* message_slot(uint32_t piece) const;

  const int rank_, size_;
  const std::chrono::duration<double> limit_;
  const int num_cores_;  // that this process may use
  Shared* shared_ = nullptr;
  void* mapped_ = nullptr;  // what the destructor unmaps

  // How often this rank has met the others, and how many pieces it has put into slots, or taken out of them.
  uint32_t num_meetings_ = 0, num_sums_ = 0, num_begun_ = 0, num_finished_ = 0, num_messages_ = 0;
  uint32_t num_gathered_[kMaxRanks] = {};  // of each rank; of the own one alone in ranks other than 0
};

}  // namespace headrace
