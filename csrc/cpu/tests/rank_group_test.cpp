// The collectives of ranks, played by threads over the same memory, so that the thread sanitizer sees every access: what scripts/sanitize
// builds. Ranks that are processes are tested in tests/distributed.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
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

#include "../rank_group.h"
#include "../threads.h"

namespace headrace {
namespace {

constexpr double kLimit = 60;  // seconds; reached only when a test fails

std::atomic<int64_t> g_passed{0}, g_failed{0};

void expect(bool holds, const std::string& what) {
  ++(holds ? g_passed : g_failed);
  if (!holds) std::printf("FAILED: %s\n", what.c_str());
}

// Zeroed memory for a group; exactly its size, so that an access beyond it is seen.
struct Memory {
  explicit Memory(int size) {
    const size_t bytes = static_cast<size_t>(RankGroup::bytes(size));
    if (posix_memalign(&data, 4096, bytes) != 0) throw std::bad_alloc();
    std::memset(data, 0, bytes);
  }
  ~Memory() { std::free(data); }
  void* data = nullptr;
};

// Runs body(group) in a thread for each rank.
void in_ranks(int size, const std::function<void(RankGroup&)>& body, double limit_s = kLimit) {
  const Memory memory(size);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      RankGroup group(memory.data, rank, size, limit_s);
      body(group);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

// "" when body() returns, otherwise the message of what it throws.
std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// xorshift32 (Marsaglia, 2003).
struct Random {
  uint32_t state;
  uint32_t next() {
    state ^= state << 13;
    state ^= state >> 17;
    return state ^= state << 5;
  }
};

// Element i of what `rank` gives to call number `call`: of very different sizes, so that the order of a sum shows.
float element(int rank, int call, int64_t i) {
  const uint32_t mixed = (static_cast<uint32_t>(rank) * 7919u + static_cast<uint32_t>(call) * 104729u + static_cast<uint32_t>(i)) * 2654435761u;
  return static_cast<float>(static_cast<int32_t>(mixed)) * (mixed % 3 == 0 ? 1e-9f : 1e-3f);
}

std::string told(const char* what, const RankGroup& group, int call, int64_t n) {
  return std::string(what) + " " + std::to_string(call) + " of " + std::to_string(n) + ", rank " + std::to_string(group.rank()) + " of " +
         std::to_string(group.size());
}

std::vector<float> own_elements(const RankGroup& group, int call, int64_t n) {
  std::vector<float> x(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) x[static_cast<size_t>(i)] = element(group.rank(), call, i);
  return x;
}

void expect_sum(const std::vector<float>& x, const RankGroup& group, int call) {
  const auto n = static_cast<int64_t>(x.size());
  bool same = true;
  for (int64_t i = 0; i < n; ++i) {
    float want = element(0, call, i);
    for (int rank = 1; rank < group.size(); ++rank) want += element(rank, call, i);
    same = same && std::memcmp(&x[static_cast<size_t>(i)], &want, sizeof want) == 0;
  }
  expect(same, told("sum", group, call, n));
}

void sum(RankGroup& group, int call, int64_t n) {
  std::vector<float> x = own_elements(group, call, n);
  group.all_reduce(x.data(), n);
  expect_sum(x, group, call);
}

// Rows of each rank lie further apart than they are wide.
void gather(RankGroup& group, int call, int64_t rows, int64_t width) {
  std::vector<int64_t> columns;
  int64_t total = 0;
  for (int rank = 0; rank < group.size(); ++rank) {
    columns.push_back((rank + call) % 3 * width);
    total += columns.back();
  }
  const int64_t own = columns[static_cast<size_t>(group.rank())], stride = own + 3;
  std::vector<float> x(static_cast<size_t>(rows * stride + 1)), out(static_cast<size_t>(group.rank() == 0 ? rows * (total + 1) + 1 : 0), -1);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < own; ++i) x[static_cast<size_t>(row * stride + i)] = element(group.rank(), call, row * own + i);
  }
  group.gather(x.data(), stride, rows, columns.data(), group.rank() == 0 ? out.data() : nullptr, total + 1);
  if (group.rank() != 0) return;
  bool same = true;
  for (int64_t row = 0; row < rows; ++row) {
    const float* at = &out[static_cast<size_t>(row * (total + 1))];
    for (int rank = 0; rank < group.size(); ++rank) {
      const int64_t n = columns[static_cast<size_t>(rank)];
      for (int64_t i = 0; i < n; ++i) same = same && *at++ == element(rank, call, row * n + i);
    }
    same = same && *at == -1;
  }
  expect(same, told("gather", group, call, rows * width));
}

void message(RankGroup& group, int call, int64_t size) {
  std::string want(static_cast<size_t>(size), 0), got;
  for (int64_t i = 0; i < size; ++i) want[static_cast<size_t>(i)] = static_cast<char>(call + i * 31);
  if (group.rank() == 0) return group.send(want.data(), size);
  expect(group.receive(got) == size && got == want, told("message", group, call, size));
}

// The same calls, of any kind and size, in every rank.
void calls() {
  for (const int threads : {1, 2}) {
    set_num_threads(threads);
    for (const int size : {1, 2, 3, 4}) {
      in_ranks(size, [](RankGroup& group) {
        Random random{2463534242u};
        for (int call = 0; call < 250; ++call) {
          const uint32_t kind = random.next() % 4;
          const bool is_large = random.next() % 16 == 0;
          const int64_t n = random.next() % (is_large ? 200'000 : 600);
          if (kind == 0) gather(group, call, n % 7, n / 7);
          else if (kind == 1) message(group, call, n);
          else sum(group, call, n);
        }
      });
    }
  }
  set_num_threads(1);
}

// Always a sum on its way, another beside it half of the time, and whole sums between them. The last ones do not fit into a slot.
void begun_sums() {
  for (const int size : {1, 2, 3, 4}) {
    in_ranks(size, [](RankGroup& group) {
      std::vector<float> before;
      for (int call = 0; call < 200; ++call) {
        std::vector<float> x = own_elements(group, call, call < 197 ? call * 131 % 5000 : (1 << 20) + call);
        group.begin_sum(x.data(), static_cast<int64_t>(x.size()));
        if (call > 0) {
          group.finish_sum(before.data(), static_cast<int64_t>(before.size()));
          expect_sum(before, group, call - 1);
        }
        if (call % 3 == 0) sum(group, call, 50);
        before = std::move(x);
      }
      group.finish_sum(before.data(), static_cast<int64_t>(before.size()));
      expect_sum(before, group, 199);
    });
  }
}

// What was given to a sum is not seen before the delay is over.
void delayed_sums() {
  in_ranks(2, [](RankGroup& group) {
    if (group.rank() == 0) group.delay_sums(0.02);
    message(group, 0, 0);
    const auto begin = std::chrono::steady_clock::now();
    sum(group, 0, 10);
    float x = 0;
    group.begin_sum(&x, 1);
    group.finish_sum(&x, 1);
    expect(std::chrono::steady_clock::now() - begin >= std::chrono::milliseconds(40), "two sums over a slow network");
  });
}

// Many messages that nobody receives yet, up to the room there is: none is lost, and rank 0 goes on at once.
void messages_ahead() {
  in_ranks(3, [](RankGroup& group) {
    if (group.rank() == 0) {
      for (int call = 0; call < 8; ++call) message(group, call, call);
    }
    sum(group, 100, 5);
    if (group.rank() != 0) {
      for (int call = 0; call < 8; ++call) message(group, call, call);
    }
  });
}

// Every kind of wait ends with the reason, as do later calls; a later reason does not count.
void broken() {
  in_ranks(4, [](RankGroup& group) {
    std::string got;
    std::vector<float> x(10);
    const int64_t columns[4] = {2, 2, 2, 2};
    const std::string error = error_of([&] {
      if (group.rank() == 0) group.gather(x.data(), 2, 1, columns, x.data(), 8);
      if (group.rank() == 1) group.all_reduce(x.data(), 10);
      if (group.rank() == 2) group.receive(got);
      if (group.rank() == 3) group.break_up("the third rank is tired");
    });
    expect(error == (group.rank() == 3 ? "" : "the third rank is tired"), "a wait that is broken up: " + error);
    group.break_up("another reason");
    const std::string later = error_of([&] { group.all_reduce(x.data(), 10); });
    expect(later == "the third rank is tired", "a call to a broken group: " + later);
  });
  const Memory memory(2);
  RankGroup group(memory.data, 0, 2, kLimit);
  std::string reason(510, 'a');
  reason += "\xc3\xa9";  // its second byte has no room
  group.break_up(reason.c_str());
  float x = 0;
  expect(error_of([&] { group.all_reduce(&x, 1); }) == reason.substr(0, 510), "a reason that is too long is cut between characters");
}

void limits() {
  in_ranks(
      3,
      [](RankGroup& group) {
        float x = 0;
        if (group.rank() == 2) return;
        const std::string error = error_of([&] { group.all_reduce(&x, 1); });
        expect(error == "rank 2 did not answer within 0.05 s", "a rank that does not come: " + error);
      },
      0.05);
  const Memory memory(2);
  RankGroup group(memory.data, 0, 2, 0.05);
  const std::string error = error_of([&] {
    for (int i = 0; i < 9; ++i) group.send("x", 1);
  });
  expect(error == "rank 1 did not answer within 0.05 s", "a message for which there is no room: " + error);
}

void refused() {
  const Memory memory(2);
  const int64_t columns[2] = {1, 1}, negative[2] = {1, -1};
  float x[4] = {};
  RankGroup first(memory.data, 0, 2, kLimit), second(memory.data, 1, 2, kLimit);
  std::string got;
  for (const std::function<void()>& call : std::vector<std::function<void()>>{
           [&] { RankGroup(memory.data, 2, 2, kLimit); }, [&] { RankGroup(memory.data, 0, RankGroup::kMaxRanks + 1, kLimit); },
           [&] { RankGroup(memory.data, 0, 2, 0); }, [&] { RankGroup(-1, 0, 2, kLimit); }, [&] { first.all_reduce(x, -1); },
           [&] { first.begin_sum(x, -1); }, [&] { first.finish_sum(x, 1); },
           [&] { first.gather(x, 1, 1, negative, x, 2); }, [&] { first.gather(x, 1, 1, columns, nullptr, 2); },
           [&] { first.gather(x, 1, 2, columns, x, 1); }, [&] { second.gather(x, 1, 1, columns, x, 2); }, [&] { first.receive(got); },
           [&] { second.send("", 0); }}) {
    bool is_refused = false;
    try {
      call();
    } catch (const std::invalid_argument&) {
      is_refused = true;
    }
    expect(is_refused, "what does not fit is refused");
  }
}

// Each rank with a mapping of its own of the same file.
void files() {
  const int fd = memfd_create("headrace-test", MFD_CLOEXEC);
  expect(fd >= 0 && ftruncate(fd, RankGroup::bytes(2) - 1) == 0, "a file in memory");
  expect(!error_of([&] { RankGroup(fd, 0, 2, kLimit); }).empty(), "a file that is too small");
  expect(ftruncate(fd, RankGroup::bytes(2)) == 0, "a larger file");
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([fd, rank] {
      RankGroup group(fd, rank, 2, kLimit);
      sum(group, 0, 1000);
      message(group, 1, 100'000);
      gather(group, 2, 3, 100);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  close(fd);
}

int run() {
  calls();
  begun_sums();
  delayed_sums();
  messages_ahead();
  broken();
  limits();
  refused();
  files();
  std::printf("%lld passed, %lld failed\n", static_cast<long long>(g_passed), static_cast<long long>(g_failed));
  return g_failed == 0 && g_passed > 0 ? 0 : 1;
}

}  // namespace
}  // namespace headrace

int main() { return headrace::run(); }
