#if defined(__x86_64__)
#include "cpu/vq_prefilter_i16.h"

namespace uefl::cpu {
const PrefilterKernel vq_prefilter_avx2 = kKernel;
}
#endif
