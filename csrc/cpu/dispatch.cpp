#include "dispatch.h"

#include <atomic>
#include <stdexcept>

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

// The instruction sets of this build, best first: HEADRACE_VARIANT(name, what it needs). A name is that of a headrace_variant() in
// CMakeLists.txt. HEADRACE_NEEDS(feature) takes the names of __builtin_cpu_supports, which also asks the operating system, and on ARM
// those of /proc/cpuinfo.
#if defined(__x86_64__)
#define HEADRACE_NEEDS_AVX2 HEADRACE_NEEDS("sse4.2") HEADRACE_NEEDS("avx2") HEADRACE_NEEDS("fma") HEADRACE_NEEDS("f16c")
#define HEADRACE_NEEDS_AVX512                                                                                       \
  HEADRACE_NEEDS_AVX2 HEADRACE_NEEDS("avx512f") HEADRACE_NEEDS("avx512bw") HEADRACE_NEEDS("avx512dq") HEADRACE_NEEDS("avx512vl")
#define HEADRACE_NEEDS_VNNI HEADRACE_NEEDS_AVX512 HEADRACE_NEEDS("avx512vnni")
#define HEADRACE_VARIANTS                                                     \
  HEADRACE_VARIANT(avx512bf16, HEADRACE_NEEDS_VNNI HEADRACE_NEEDS("avx512bf16")) \
  HEADRACE_VARIANT(avx512vnni, HEADRACE_NEEDS_VNNI)                           \
  HEADRACE_VARIANT(avx512, HEADRACE_NEEDS_AVX512)                             \
  HEADRACE_VARIANT(avx2, HEADRACE_NEEDS_AVX2)                                 \
  HEADRACE_VARIANT(baseline, HEADRACE_NEEDS("sse4.2"))
#define HEADRACE_NEEDS(feature) \
  if (!__builtin_cpu_supports(feature)) missing += (missing.empty() ? "" : ", ") + std::string(feature);
#elif defined(__aarch64__)
#define HEADRACE_HAS_atomics (getauxval(AT_HWCAP) & HWCAP_ATOMICS)
#define HEADRACE_HAS_asimddp (getauxval(AT_HWCAP) & HWCAP_ASIMDDP)
#define HEADRACE_HAS_i8mm (getauxval(AT_HWCAP2) & HWCAP2_I8MM)
#define HEADRACE_NEEDS_DOTPROD HEADRACE_NEEDS(atomics) HEADRACE_NEEDS(asimddp)
#define HEADRACE_VARIANTS                                                 \
  HEADRACE_VARIANT(neon_i8mm, HEADRACE_NEEDS_DOTPROD HEADRACE_NEEDS(i8mm)) \
  HEADRACE_VARIANT(neon_dotprod, HEADRACE_NEEDS_DOTPROD)                  \
  HEADRACE_VARIANT(neon, )
#define HEADRACE_NEEDS(feature) \
  if (HEADRACE_HAS_##feature == 0) missing += (missing.empty() ? "" : ", ") + std::string(#feature);
#else
#define HEADRACE_VARIANTS HEADRACE_VARIANT(baseline, )
#endif

namespace headrace {

#define HEADRACE_VARIANT(name, needs) \
  namespace name {                    \
  const KernelTable& table();         \
  }
HEADRACE_VARIANTS
#undef HEADRACE_VARIANT

namespace {

struct Variant {
  const char* name;
  const KernelTable& (*table)();
  std::string (*missing)();  // "" when this machine has what it needs
};

#define HEADRACE_VARIANT(name, needs) \
  {#name, &name::table, [] {          \
     std::string missing;             \
     needs return missing;            \
   }},
const Variant kVariants[] = {HEADRACE_VARIANTS};
#undef HEADRACE_VARIANT

const Variant* find(const std::string& isa) {
  for (const Variant& variant : kVariants) {
    if (isa == variant.name) return &variant;
  }
  return nullptr;
}

const KernelTable* best() {
  for (const Variant& variant : kVariants) {
    if (variant.missing().empty()) return &variant.table();
  }
  throw std::runtime_error(why_not_isa(compiled_isas().back()));
}

std::atomic<const KernelTable*> g_selected{nullptr};

}  // namespace

std::vector<std::string> compiled_isas() {
  std::vector<std::string> names;
  for (const Variant& variant : kVariants) names.emplace_back(variant.name);
  return names;
}

std::string why_not_isa(const std::string& isa) {
  const Variant* const variant = find(isa);
  if (variant == nullptr) {
    std::string known;
    for (const std::string& name : compiled_isas()) known += (known.empty() ? "" : ", ") + name;
    return "unknown instruction set '" + isa + "': this build has " + known;
  }
  const std::string missing = variant->missing();
  return missing.empty() ? "" : "this processor lacks " + missing + ", which '" + isa + "' needs";
}

void select_isa(const std::string& isa) {
  const std::string reason = why_not_isa(isa);
  if (!reason.empty()) throw std::invalid_argument(reason);
  g_selected.store(&find(isa)->table());
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
