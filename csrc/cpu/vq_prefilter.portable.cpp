#if defined(__SSE2__)
#include "cpu/vq_prefilter_i16.h"

namespace uefl::cpu {
const PrefilterKernel vq_prefilter_portable = kKernel;
}
#endif
