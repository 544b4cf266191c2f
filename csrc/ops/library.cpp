// What csrc/cuda was compiled for, as CMake writes it ("80-real,90a-real,..."); empty without CUDA.
// _library.py reads it.
extern "C" __attribute__((visibility("default"))) const char* uefl_cuda_architectures() {
  return UEFL_CUDA_ARCHITECTURES;
}
