// Module _host: the kernels for NumPy arrays, and the plan of a search on this machine. It never uses torch.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cpu/features.h"
#include "cpu/kmeans.h"
#include "cpu/threads.h"
#include "cpu/vq_assign.h"
#include "cpu/vq_prefilter.h"

namespace py = pybind11;
namespace cpu = uefl::cpu;

namespace {

cpu::Dtype dtype_of(const py::array& array, const char* name) {
  if (py::isinstance<py::array_t<float>>(array)) return cpu::Dtype::f32;
  if (py::isinstance<py::array_t<double>>(array)) return cpu::Dtype::f64;
  throw py::type_error("vq_assign: " + std::string(name) + " has dtype " +
                       std::string(py::str(array.dtype())) + ", expected float32 or float64");
}

std::string shape_of(const py::array& array) {
  std::string text;
  for (py::ssize_t i = 0; i < array.ndim(); ++i) text += (i ? ", " : "") + std::to_string(array.shape(i));
  return "[" + text + "]";
}

// Returns a contiguous array. The kernels read elements through typed pointers, so a misaligned array is
// copied, too.
py::array contiguous(const py::array& array) {
  return py::array::ensure(array,
                           static_cast<int>(py::array::c_style) | py::detail::npy_api::NPY_ARRAY_ALIGNED_);
}

// Returns x as strided rows. Copies x if it is misaligned, if its strides are not multiples of the element
// size, or if its rows need more than two strides.
cpu::StridedRows view(py::array& x, cpu::Dtype dtype) {
  cpu::StridedRows rows;
  while (true) {
    bool whole = reinterpret_cast<uintptr_t>(x.data()) % x.itemsize() == 0;
    std::vector<int64_t> sizes(x.shape(), x.shape() + x.ndim()), strides(x.ndim());
    for (py::ssize_t i = 0; i < x.ndim(); ++i) {
      whole = whole && x.strides(i) % x.itemsize() == 0;
      strides[i] = x.strides(i) / x.itemsize();
    }
    if (whole && cpu::view_rows(x.data(), dtype, sizes.data(), strides.data(), x.ndim(), rows)) return rows;
    x = x.attr("copy")("C");
  }
}

int64_t thread_count(int64_t blocks, std::optional<int64_t> at_most = {}) {
  return std::max<int64_t>(1,
                           std::min<int64_t>(blocks, at_most.value_or(std::thread::hardware_concurrency())));
}

py::array_t<int64_t> vq_assign(py::array x, const py::array& codebook_given, const std::string& metric,
                               bool exact, std::optional<int64_t> at_most) {
  const cpu::Dtype dtype = dtype_of(x, "x"), codebook_dtype = dtype_of(codebook_given, "codebook");
  if (metric != "l2" && metric != "cosine")
    throw py::value_error("vq_assign: metric '" + metric + "' is not known, expected l2 or cosine");
  if (at_most && *at_most < 1) {
    throw py::value_error("vq_assign: threads must be at least 1, or None for all, got " +
                          std::to_string(*at_most));
  }
  const py::array codebook = contiguous(codebook_given);
  const py::ssize_t dims = codebook.ndim();
  if (x.ndim() < 1) throw py::value_error("vq_assign: x must have shape [..., D], got a scalar");
  if (dims != 2 && dims != 3) {
    throw py::value_error("vq_assign: codebook must have shape [K, d] or [S, K, d], got " +
                          shape_of(codebook));
  }
  if (codebook.size() == 0) {
    throw py::value_error("vq_assign: codebook " + shape_of(codebook) +
                          " is empty; it needs at least one codeword of one element");
  }
  const int64_t dim = x.shape(x.ndim() - 1), d = codebook.shape(dims - 1);
  const cpu::Codebooks codebooks_view{codebook.data(), codebook_dtype, dims == 3 ? codebook.shape(0) : 1,
                                      codebook.shape(dims - 2), d};
  if (dims == 3 ? codebooks_view.count * d != dim : dim == 0 || dim % d != 0) {
    throw py::value_error("vq_assign: x " + shape_of(x) + " does not fit codebook " + shape_of(codebook) +
                          (dims == 3 ? "; its last size must be " + std::to_string(codebooks_view.count * d)
                                     : "; make its last size a multiple of " + std::to_string(d)));
  }
  std::vector<py::ssize_t> shape(x.shape(), x.shape() + x.ndim());
  shape.back() = dim / d;
  py::array_t<int64_t> indices(shape);
  int64_t* out = indices.mutable_data();
  const cpu::StridedRows given = view(x, dtype);

  const py::gil_scoped_release release;
  const cpu::Search search(codebooks_view, metric == "l2" ? cpu::Metric::l2 : cpu::Metric::cosine, exact,
                           "vq_assign", cpu::on_this_thread, cpu::Search::few(given, codebooks_view));
  const cpu::StridedRows rows = search.flatten_segments(given);
  const int64_t n = rows.outer * rows.inner, step = search.block_rows(rows.dim),
                blocks = (n + step - 1) / step;
  const int64_t threads = thread_count(blocks, at_most);
  cpu::on_threads(threads, [&](int64_t thread) {
    search.assign(rows, std::min(n, blocks * thread / threads * step),
                  std::min(n, blocks * (thread + 1) / threads * step), out);
  });
  return indices;
}

// Runs k-means. uefl_kernels/numpy.py has checked the arguments.
py::tuple kmeans(py::array x, int64_t k,
                 const std::optional<py::array_t<double, py::array::c_style>>& weights,
                 const std::optional<py::array>& init_given, const std::string& method, bool spherical,
                 int64_t n_init, int64_t max_iter, double tol, int64_t seed, std::optional<int64_t> at_most) {
  const cpu::Dtype dtype = dtype_of(x, "x");
  const std::optional<py::array> init = init_given ? std::optional(contiguous(*init_given)) : std::nullopt;
  const py::ssize_t n = x.shape(0), d = x.shape(1);
  py::array centers(x.dtype(), std::vector<py::ssize_t>{k, d});
  py::array_t<int64_t> labels(n);
  double inertia = 0;
  int64_t iterations = 0;
  const cpu::KMeansOptions options{init                    ? cpu::Seeding::given
                                   : method == "random"    ? cpu::Seeding::random
                                   : method == "k-means||" ? cpu::Seeding::parallel
                                                           : cpu::Seeding::plus_plus,
                                   spherical, n_init, max_iter, tol};
  const cpu::KMeansProblem problem{.x = view(x, dtype),
                                   .weights = weights ? weights->data() : nullptr,
                                   .init = init ? init->data() : nullptr,
                                   .k = k,
                                   .seed = static_cast<uint64_t>(seed),
                                   .result = {.centers = centers.mutable_data(),
                                              .labels = labels.mutable_data(),
                                              .inertia = &inertia,
                                              .iterations = &iterations}};
  {
    const py::gil_scoped_release release;
    cpu::kmeans(problem, options, [&](int64_t count, const std::function<void(int64_t, int64_t)>& work) {
      const int64_t threads = thread_count(count, at_most);
      cpu::on_threads(
          threads, [&](int64_t thread) { work(count * thread / threads, count * (thread + 1) / threads); });
    });
  }
  return py::make_tuple(centers, labels, inertia, iterations);
}

py::dict cpu_features() {
  py::dict result;
  for (const auto& [feature, present] : cpu::features()) result[feature.c_str()] = present;
  return result;
}

std::string name(cpu::Arithmetic arithmetic) {
  switch (arithmetic) {
    case cpu::Arithmetic::f32:
      return "float32";
    case cpu::Arithmetic::bf16x3:
      return "three bfloat16 products";
    case cpu::Arithmetic::bf16:
      return "one bfloat16 product";
    case cpu::Arithmetic::i16:
      break;
  }
  return "16-bit integers";
}

py::dict plan(int64_t n, int64_t d, int64_t k, int64_t segments) {
  if (n < 0 || d < 1 || k < 1 || segments < 1)
    throw py::value_error("plan: n must be at least 0, and d, k and segments at least 1");
  const cpu::SearchPlan plan = cpu::plan(d, k);
  const int64_t step = cpu::block_rows(d * segments, k), blocks = (n + step - 1) / step;
  py::dict result;
  result["variant"] = cpu::name(plan.isa);
  result["arithmetic"] = plan.direct ? "float64"
                                     : (plan.prefilter ? name(plan.prefilter->arithmetic) + ", then " : "") +
                                           name(plan.kernel->arithmetic);
  result["tile_rows"] = plan.kernel->rows;
  result["tile_codewords"] = plan.kernel->block_codewords;
  result["block_rows"] = step;
  result["blocks"] = blocks;
  result["threads"] = thread_count(blocks);
  result["uncertified_rows"] = "scored again; codewords within the error bound are then evaluated in float64";
  return result;
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() = "The CPU kernels for NumPy arrays, the features of this CPU and the plan chosen for a shape.";
  m.def("cpu_features", &cpu_features,
        "Feature name -> bool, for each feature that a compiled variant needs.");
  m.def(
      "variant", [] { return cpu::name(cpu::isa()); },
      "The best variant of this CPU: 'amx', 'avx512vnni', 'avx512', 'avx2' or 'portable' (UEFL_CPU selects "
      "a lesser one).");
  m.def("plan", &plan, py::arg("n"), py::arg("d"), py::arg("k"), py::arg("segments") = 1,
        "How n rows of `segments` segments of d elements would be searched among k codewords (one codebook "
        "for each segment).");
  m.def("vq_assign", &vq_assign, py::arg("x"), py::arg("codebook"), py::arg("metric") = "l2",
        py::arg("exact") = true, py::arg("threads") = py::none(),
        "uefl_kernels.vq_assign for float32 and float64 arrays of any strides: x [..., D], codebook [K, d] "
        "or [S, K, d]\n"
        "-> indices [..., S], int64. At most `threads` threads, all by default. Raises TypeError, ValueError "
        "and, for a codebook that is "
        "not finite, RuntimeError.");
  m.def("kmeans", &kmeans, py::arg("x"), py::arg("k"), py::arg("weights"), py::arg("init"), py::arg("method"),
        py::arg("spherical"), py::arg("n_init"), py::arg("max_iter"), py::arg("tol"), py::arg("seed"),
        py::arg("threads") = py::none(),
        "The implementation of uefl_kernels.numpy.kmeans, which checks the arguments -> (centers, labels, "
        "inertia, iterations).");
}
