// Where a thread of the pool runs, and lending it a core.
//
// The system may take a thread off its core in the middle of a block and give the core to another process for a whole slice, some milliseconds.
// Who waits for that block would leave a core idle meanwhile: the system does not soon move a thread that has just run. So the waiting
// thread moves the other one to its own core, and sleeps. When the block is done, the thread goes back into the queue of the core from
// which it came, now without a block that others wait for. Linux; elsewhere nothing is known of a thread and nothing moves.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

namespace headrace {

#if defined(__linux__)

class alignas(64) Seat {
 public:
  // The calling thread has this seat from now on.
  void take() { thread_.store(static_cast<pid_t>(syscall(SYS_gettid)), std::memory_order_relaxed); }

  // The thread of this seat begins, and has ended, its part of a job.
  void begin() {
    core_.store(sched_getcpu(), std::memory_order_relaxed);
    works_.store(true, std::memory_order_seq_cst);
  }
  void end() {
    works_.store(false, std::memory_order_seq_cst);
    if (loan_.load(std::memory_order_seq_cst) != Loan::kNone) give_back_core();
  }

  // For another thread, one at a time, which is about to sleep: if the thread of this seat works but is off its core, it gets the core of
  // that thread. Returns whether it did.
  bool lend_core() {
    if (!works_.load(std::memory_order_relaxed) || !is_off_core()) return false;
    const int home = core_.load(std::memory_order_relaxed), here = sched_getcpu();
    if (home < 0 || here < 0 || home == here) return false;
    loan_.store(Loan::kBeingMade, std::memory_order_seq_cst);
    // Who works now looks for a loan when it has ended.
    const bool is_made = works_.load(std::memory_order_seq_cst) && get_cores() && set_cores(thread(), only(here));
    loan_.store(is_made ? Loan::kMade : Loan::kNone, std::memory_order_seq_cst);
    return is_made;
  }

 private:
  enum class Loan { kNone, kBeingMade, kMade };

  pid_t thread() const { return thread_.load(std::memory_order_relaxed); }

  // Whether its processor time stands still.
  bool is_off_core() const {
    const int64_t before = processor_time_ns(thread());
    return before >= 0 && processor_time_ns(thread()) == before;
  }

  void give_back_core() {
    Loan loan;
    while ((loan = loan_.load(std::memory_order_seq_cst)) == Loan::kBeingMade) std::this_thread::yield();
    if (loan == Loan::kNone) return;
    set_cores(0, only(core_.load(std::memory_order_relaxed)));  // returns when it has its turn there
    set_cores(0, cores_);
    loan_.store(Loan::kNone, std::memory_order_seq_cst);
  }

  bool get_cores() { return sched_getaffinity(thread(), sizeof cores_, &cores_) == 0; }
  static bool set_cores(pid_t thread, const cpu_set_t& cores) { return sched_setaffinity(thread, sizeof cores, &cores) == 0; }
  static cpu_set_t only(int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    return cores;
  }

  // Nanoseconds of processor time that a thread of this process has used; -1 when there is no such thread. The bits of a thread's clock are
  // its inverted id, CPUCLOCK_PERTHREAD_MASK and CPUCLOCK_SCHED (include/linux/posix-timers_types.h); see also clock_getcpuclockid(3).
  static int64_t processor_time_ns(pid_t thread) {
    timespec time;
    const auto clock = static_cast<clockid_t>(~static_cast<uint32_t>(thread) << 3 | 4 | 2);
    return clock_gettime(clock, &time) == 0 ? int64_t{1'000'000'000} * time.tv_sec + time.tv_nsec : -1;
  }

  std::atomic<pid_t> thread_{0};
  std::atomic<int> core_{-1};
  std::atomic<bool> works_{false};
  std::atomic<Loan> loan_{Loan::kNone};
  cpu_set_t cores_{};  // where the thread may run otherwise, while it has a loan
};

#else

class Seat {
 public:
  void take() {}
  void begin() {}
  void end() {}
  bool lend_core() { return false; }
};

#endif

}  // namespace headrace
