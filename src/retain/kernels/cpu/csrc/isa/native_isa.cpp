// Prints the fastest instruction set of this machine. CMake runs it for RETAIN_ISAS=native; it is in no library.
#include <cstdio>

#include "isa/isa_support.h"

int main() { std::puts(retain::supported_names().front()); }
