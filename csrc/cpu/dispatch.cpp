#include "dispatch.h"

#include <atomic>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

// The instruction sets, best first: HEADRACE_VARIANT(name, what it needs). A name is that of a headrace_variant() in CMakeLists.txt, which
// says with HEADRACE_HAS_<name>, 1 or 0, whether this build has it. HEADRACE_NEEDS(feature) takes the names of __builtin_cpu_supports, which also asks the operating system, and on ARM
// those of /proc/cpuinfo. amx stands behind avx512bf16, since no processor has run it yet: it must be asked for.
#if defined(__x86_64__)
#define HEADRACE_NEEDS_AVX2 HEADRACE_NEEDS("sse4.2") HEADRACE_NEEDS("avx2") HEADRACE_NEEDS("fma") HEADRACE_NEEDS("f16c")
#define HEADRACE_NEEDS_AVX512                                                                                       \
  HEADRACE_NEEDS_AVX2 HEADRACE_NEEDS("avx512f") HEADRACE_NEEDS("avx512bw") HEADRACE_NEEDS("avx512dq") HEADRACE_NEEDS("avx512vl")
#define HEADRACE_NEEDS_VNNI HEADRACE_NEEDS_AVX512 HEADRACE_NEEDS("avx512vnni")
#define HEADRACE_VARIANTS                                                     \
  HEADRACE_VARIANT(avx512bf16, HEADRACE_NEEDS_VNNI HEADRACE_NEEDS("avx512bf16")) \
  HEADRACE_VARIANT(amx, HEADRACE_NEEDS_VNNI HEADRACE_NEEDS("avx512bf16") HEADRACE_NEEDS_TILES) \
  HEADRACE_VARIANT(avx512vnni, HEADRACE_NEEDS_VNNI)                           \
  HEADRACE_VARIANT(avx512, HEADRACE_NEEDS_AVX512)                             \
  HEADRACE_VARIANT(avxvnni, HEADRACE_NEEDS_AVX2 HEADRACE_NEEDS("avxvnni"))    \
  HEADRACE_VARIANT(avx2, HEADRACE_NEEDS_AVX2)                                 \
  HEADRACE_VARIANT(baseline, HEADRACE_NEEDS("sse4.2"))
#define HEADRACE_NEEDS(feature) \
  if (!__builtin_cpu_supports(feature)) add(missing, feature);
#define HEADRACE_NEEDS_TILES add(missing, missing_for_tiles());
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
  if (HEADRACE_HAS_##feature == 0) add(missing, #feature);
#else
#define HEADRACE_VARIANTS HEADRACE_VARIANT(baseline, )
#endif

namespace headrace {

#if defined(__x86_64__)
extern const bool kAskForWeights = (__builtin_cpu_init(), !__builtin_cpu_is("amdfam17h") && !__builtin_cpu_is("amdfam19h"));
#else
extern const bool kAskForWeights = true;
#endif

#define HEADRACE_VARIANT(name, needs) \
  namespace name {                    \
  const KernelTable& table();         \
  }
HEADRACE_VARIANTS
#undef HEADRACE_VARIANT

namespace {

// To a list of what this machine lacks; "": nothing.
[[maybe_unused]] void add(std::string& missing, const std::string& what) {
  if (!what.empty()) missing += (missing.empty() ? "" : ", ") + what;
}

#if defined(__x86_64__)
// Tiles of bytes and of bfloat16 (CPUID leaf 7), and Linux's permission for this process to use their registers.
std::string missing_for_tiles() {
#if defined(HEADRACE_AMX_MODEL)
  return "";
#else
  constexpr unsigned kTiles = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  constexpr int kRequestPermission = 0x1023, kTileData = 18;   // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || (edx & kTiles) != kTiles) return "amx";
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? "" : "the operating system's permission for tile registers";
#endif
}
#endif

struct Variant {
  const char* name;
  const KernelTable& (*table)();  // null: not in this build
  std::string (*missing)();       // "" when this machine has what it needs
};

#define HEADRACE_TABLE_0(name) nullptr
#define HEADRACE_TABLE_1(name) &name::table
#define HEADRACE_TABLE_(has, name) HEADRACE_TABLE_##has(name)
#define HEADRACE_TABLE(has, name) HEADRACE_TABLE_(has, name)
#define HEADRACE_VARIANT(name, needs)                       \
  {#name, HEADRACE_TABLE(HEADRACE_HAS_##name, name), [] {   \
     std::string missing;                                   \
     needs return missing;                                  \
   }},
const Variant kVariants[] = {HEADRACE_VARIANTS};
#undef HEADRACE_VARIANT

const Variant* find(const std::string& isa) {
  for (const Variant& variant : kVariants) {
    if (isa == variant.name) return &variant;
  }
  return nullptr;
}

// Of this build, best first.
std::vector<const Variant*> compiled() {
  std::vector<const Variant*> variants;
  for (const Variant& variant : kVariants) {
    if (variant.table != nullptr) variants.push_back(&variant);
  }
  return variants;
}

const KernelTable* best() {
  for (const Variant* variant : compiled()) {
    if (variant->missing().empty()) return &variant->table();
  }
  throw std::runtime_error(why_not_isa(compiled().back()->name));
}

std::atomic<const KernelTable*> g_selected{nullptr};

}  // namespace

std::vector<std::string> known_isas() {
  std::vector<std::string> names;
  for (const Variant& variant : kVariants) names.emplace_back(variant.name);
  return names;
}

std::string why_not_isa(const std::string& isa) {
  const Variant* const variant = find(isa);
  if (variant == nullptr) {
    std::string has;
    for (const Variant* present : compiled()) has += (has.empty() ? "" : ", ") + std::string(present->name);
    return "unknown instruction set '" + isa + "': this build has " + has;
  }
  if (variant->table == nullptr) return "not in this build";
  const std::string missing = variant->missing();
  return missing.empty() ? "" : "this processor lacks " + missing + ", which '" + isa + "' needs";
}

void select_isa(const std::string& isa) {
  const Variant* const variant = find(isa);
  const std::string reason = why_not_isa(isa);
  if (variant != nullptr && variant->table == nullptr) {
    throw std::invalid_argument(reason + ", but in that of scripts/setup --all-isas");
  }
  if (!reason.empty()) throw std::invalid_argument(reason);
  g_selected.store(&variant->table());
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
