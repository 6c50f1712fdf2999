#include "dispatch.h"

#include <atomic>
#include <stdexcept>

namespace headrace {

namespace baseline {
const KernelTable& table();
}
#if defined(__x86_64__)
namespace avx2 {
const KernelTable& table();
}
namespace avx512 {
const KernelTable& table();
}
namespace avx512vnni {
const KernelTable& table();
}
#endif

namespace {

const KernelTable* find(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx512vnni") return &avx512vnni::table();
  if (isa == "avx512") return &avx512::table();
  if (isa == "avx2") return &avx2::table();
#endif
  if (isa == "baseline") return &baseline::table();
  return nullptr;
}

const KernelTable* best() {
  for (const std::string& isa : compiled_isas()) {
    if (why_not_isa(isa).empty()) return find(isa);
  }
  throw std::runtime_error(why_not_isa("baseline"));
}

std::atomic<const KernelTable*> g_selected{nullptr};

}  // namespace

std::vector<std::string> compiled_isas() {
#if defined(__x86_64__)
  return {"avx512vnni", "avx512", "avx2", "baseline"};
#else
  return {"baseline"};
#endif
}

std::string why_not_isa(const std::string& isa) {
  if (find(isa) == nullptr) {
    std::string known;
    for (const std::string& name : compiled_isas()) known += (known.empty() ? "" : ", ") + name;
    return "unknown instruction set '" + isa + "': this build has " + known;
  }
#if defined(__x86_64__)
  // These builtins also ask XGETBV whether the operating system saves the wide registers.
  __builtin_cpu_init();
  std::string missing;
  auto require = [&](bool supported, const char* feature) {
    if (!supported) missing += (missing.empty() ? "" : ", ") + std::string(feature);
  };
  require(__builtin_cpu_supports("sse4.2"), "sse4.2");
  if (isa != "baseline") {
    require(__builtin_cpu_supports("avx2"), "avx2");
    require(__builtin_cpu_supports("fma"), "fma");
    require(__builtin_cpu_supports("f16c"), "f16c");
  }
  if (isa == "avx512" || isa == "avx512vnni") {
    require(__builtin_cpu_supports("avx512f"), "avx512f");
    require(__builtin_cpu_supports("avx512bw"), "avx512bw");
    require(__builtin_cpu_supports("avx512dq"), "avx512dq");
    require(__builtin_cpu_supports("avx512vl"), "avx512vl");
  }
  if (isa == "avx512vnni") require(__builtin_cpu_supports("avx512vnni"), "avx512vnni");
  if (!missing.empty()) return "this processor lacks " + missing + ", which '" + isa + "' needs";
#endif
  return "";
}

void select_isa(const std::string& isa) {
  const std::string reason = why_not_isa(isa);
  if (!reason.empty()) throw std::invalid_argument(reason);
  g_selected.store(find(isa));
}

const KernelTable& kernels() {
  const KernelTable* selected = g_selected.load(std::memory_order_acquire);
  if (selected == nullptr) {
    selected = best();
    g_selected.store(selected);
  }
  return *selected;
}

}  // namespace headrace
