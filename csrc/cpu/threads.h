// The thread pool of the kernels: what it owns is who runs which block, never how a block is computed.
//
// Each thread has a contiguous share of the blocks and claims it in parts, from the front. A thread that has done its share takes from the
// back of the others' shares: when the system takes a thread off its core, one part is late, not the whole job. A caller that waits for such a
// part lends it its core (seat.h). Workers spin briefly for the next job, then sleep. The calling thread always takes part. A caller that
// finds the pool busy runs its job alone, as does a job started inside a job. The pool is made at first use, and again after a fork.
#pragma once
#include <cstddef>
#include <cstdint>

namespace headrace {

using RangeFn = void (*)(void* context, int64_t begin, int64_t end);

// Runs fn over [0, n), cut into ranges of at least `grain` (the last may be shorter), and returns when all are done.
// fn must not throw. n < 2^31.
void parallel_ranges(int64_t n, int64_t grain, RangeFn fn, void* context);

// Holds the pool for the calling thread while it lives: the jobs of a sequence follow each other without another caller between
// them. Does nothing when another thread holds it; the jobs then run as if there were no session. Sessions may nest.
class PoolSession {
 public:
  PoolSession();
  ~PoolSession();
  PoolSession(const PoolSession&) = delete;
  PoolSession& operator=(const PoolSession&) = delete;

 private:
  bool holds_;
};

// Says what the job after the next one reads in order: threads that wait for others meanwhile bring the start of their shares into
// cache. A hint, for the thread that holds the pool; null takes it back.
void expect_reads(const void* memory, int64_t bytes);

// Threads that work on a job, the caller included; n >= 1.
void set_num_threads(int n);
int num_threads();

// Memory of the calling thread, page-aligned, kept between calls: one for each purpose, only one user of each at a time.
enum class Scratch : int { kGeneral, kWeights, kLayer, kSequences, kWords };
void* thread_scratch(size_t bytes, Scratch purpose = Scratch::kGeneral);

// parallel_ranges for a callable body(begin, end).
template <class Body>
static inline void parallel_for(int64_t n, int64_t grain, Body body) {
  parallel_ranges(
      n, grain, [](void* context, int64_t begin, int64_t end) { (*static_cast<Body*>(context))(begin, end); }, &body);
}

}  // namespace headrace
