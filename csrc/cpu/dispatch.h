// Which instruction set runs: the best that the processor and the operating system support, or the one asked for.
#pragma once
#include <string>
#include <vector>

#include "ops.h"

namespace headrace {

std::vector<std::string> known_isas();                  // in this build or not, best first
std::string why_not_isa(const std::string& isa);        // "" when this build has it and this machine can run it
void select_isa(const std::string& isa);                // throws std::invalid_argument with the reason
const KernelTable& kernels();                           // throws std::runtime_error when this machine can run none of this build

}  // namespace headrace
