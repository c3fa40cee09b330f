// Functions that g++ takes from C and C++ libraries newer than those of manylinux_2_28. A wheel's library has its own.
// Only it is linked with this file (hatch_build.py), which needs g++ and glibc on x86-64.
#include <sstream>

template std::stringstream::basic_stringstream();
template std::ostringstream::basic_ostringstream();
template std::string std::stringbuf::str() const&;
template std::string std::stringbuf::str() &&;
void std::__throw_bad_array_new_length() { std::__throw_bad_alloc(); }

extern "C" {
char __libc_single_threaded = 0;  // shared pointers are always counted by atomic instructions

// those before glibc 2.29 compute the same, and also set errno as System V did
__asm__(".symver txl_exp,exp@GLIBC_2.2.5\n.symver txl_log,log@GLIBC_2.2.5");
double txl_exp(double) noexcept;
double txl_log(double) noexcept;
double exp(double x) noexcept { return txl_exp(x); }
double log(double x) noexcept { return txl_log(x); }
}
