// Names the constant of a source NAME.kernel.cpp. CMake compiles such a source once for each instruction set
// with -DUEFL_ISA=... For AVX2, UEFL_VARIANT(vq) is vq_avx2.
//
// The source uses no standard templates, and everything except the constant has internal linkage.
// strided_rows.h gives the reason.
#pragma once

#define UEFL_JOIN(name, isa) name##_##isa
#define UEFL_EXPANDED(name, isa) UEFL_JOIN(name, isa)
#define UEFL_VARIANT(name) UEFL_EXPANDED(name, UEFL_ISA)
