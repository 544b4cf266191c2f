// Returns the architectures of csrc/cuda, as CMake writes them ("80-real,90a-real,..."), or an empty string
// without CUDA. _library.py reads this.
extern "C" __attribute__((visibility("default"))) const char* uefl_cuda_architectures() {
  return UEFL_CUDA_ARCHITECTURES;
}
