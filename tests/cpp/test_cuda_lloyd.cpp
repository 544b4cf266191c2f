// Runs Lloyd's algorithm around the CUDA kernel between two searches on the CPU, thread by thread, and
// compares it with the k-means of the CPU bit for bit. The emulation comes before the kernels.
#include <algorithm>
#include <bit>
#include <cmath>

#include "check.h"
#include "cpu/kmeans.h"
#include "cpu/kmeans_problem.h"
#include "cuda/emulation.h"
#include "cuda/emulation_mma.h"
#include "cuda/kmeans_lloyd_kernels.h"
#include "cuda/row_sums.h"

namespace cpu = uefl::cpu;
namespace cuda = uefl::cuda;

template <class T>
constexpr cpu::Dtype kDtype = sizeof(T) == 8                ? cpu::Dtype::f64
                              : sizeof(T) == 4              ? cpu::Dtype::f32
                              : std::is_same_v<T, _Float16> ? cpu::Dtype::f16
                                                            : cpu::Dtype::bf16;

template <class T>
static bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// A problem has rows [n, d] with elements `stride` apart, weights or none, and given centers [k, d].
template <class T>
struct LloydProblem {
  using Center = std::conditional_t<sizeof(T) == 8, double, float>;
  int64_t n, d, k;
  std::vector<T> x;
  std::vector<double> weights = {};
  std::vector<Center> init = {};
  bool spherical = false;
  int64_t stride = 1;

  // Makes normal rows, and takes the first of them as centers.
  LloydProblem(int64_t n, int64_t d, int64_t k, int seed, int64_t stride = 1)
      : n(n), d(d), k(k), x(n * d * stride), stride(stride) {
    std::mt19937 random(seed);
    for (int64_t i = 0; const double value : normal<double>(n * d, random))
      x[i++ * stride] = static_cast<T>(value);
    for (int64_t i = 0; i < k * d; ++i) init.push_back(static_cast<Center>(x[i % (n * d) * stride]));
  }
  LloydProblem& weigh() {
    for (int64_t i = 0; i < n; ++i) weights.push_back(i % 4 ? 3.0 / static_cast<double>(1 + i) : 0);
    return *this;
  }
  LloydProblem& on_sphere() {
    spherical = true;
    return *this;
  }
  // Moves the last `count` centers far from all rows.
  LloydProblem& far(int64_t count) {
    for (int64_t i = k - count; i < k; ++i) init[i * d] = static_cast<Center>(1e4 + static_cast<double>(i));
    return *this;
  }

  // Returns the problem with rows and centers of length 1, as a fit on a sphere has them.
  LloydProblem unit() const {
    LloydProblem scaled = *this;
    const auto scale = [&](auto* values, int64_t apart) {
      std::vector<double> row(d);
      for (int64_t j = 0; j < d; ++j) row[j] = static_cast<double>(values[j * apart]);
      if (!cpu::to_unit(row.data(), d)) return;
      for (int64_t j = 0; j < d; ++j)
        values[j * apart] = static_cast<std::remove_pointer_t<decltype(values)>>(row[j]);
    };
    for (int64_t i = 0; i < n; ++i) scale(&scaled.x[i * d * stride], stride);
    for (int64_t i = 0; i < k; ++i) scale(&scaled.init[i * d], 1);
    return scaled;
  }

  double element(int64_t row, int64_t j) const {
    return static_cast<double>(cuda::widen(x[(row * d + j) * stride]));
  }
  cpu::StridedRows rows() const { return {x.data(), kDtype<T>, n, 1, d, d * stride, 0, stride}; }
};

// Returns the units of the sums. Rows that are not finite have none, because the CPU rejects them. They get
// arbitrary units.
template <class T>
static cpu::KMeansScales scales_of(const LloydProblem<T>& given) {
  const double* weights = given.weights.empty() ? nullptr : given.weights.data();
  for (const T value : given.x) {
    if (!std::isfinite(static_cast<double>(cuda::widen(value))))
      return {std::vector<double>(given.d, 0.5), std::vector<double>(given.d, 0x1p40), 0x1p50, 1};
  }
  return cpu::kmeans_scales(given.rows(), weights, cpu::on_this_thread, "kmeans");
}

// The state of a fit on the emulated GPU.
template <class T>
struct LloydFit {
  using Center = LloydProblem<T>::Center;
  LloydProblem<T> given;
  cpu::KMeansScales scales = scales_of(given);
  std::vector<double> weights = given.weights;
  std::vector<Center> centers = given.init;
  std::vector<int64_t> labels, previous;
  std::vector<long long> masses, sums, keys = std::vector<long long>(given.n, -7),
                                       farthest = std::vector<long long>(given.k, -7);
  std::vector<double> shifts = std::vector<double>(given.k, NAN);
  long long iterations = 0, ended = 0;
  cuda::Shape shape{given.n,      1,   1, given.d, given.k, 0, given.n, 0, given.d * given.stride,
                    given.stride, true};

  explicit LloydFit(const LloydProblem<T>& asked) : given(asked.spherical ? asked.unit() : asked) {
    for (double& weight : weights) weight /= scales.weight_unit;
  }
  const double* mass() const { return weights.empty() ? nullptr : weights.data(); }

  void search() {
    previous = labels;
    labels.resize(given.n);
    std::vector<double> row(given.d);
    for (int64_t i = 0; i < given.n; ++i) {
      for (int64_t j = 0; j < given.d; ++j) row[j] = given.element(i, j);
      labels[i] = nearest(row.data(), 1, centers.data(), given.k, given.d);
    }
  }

  // Sums all rows, as in the first iteration.
  void sum() {
    masses.assign(given.k, 0), sums.assign(given.k * given.d, 0);
    cuda::RowSums<T, Center> wanted{};
    wanted.indices = labels.data(), wanted.counts = masses.data(), wanted.sums = sums.data();
    wanted.scales = scales.scale.data(), wanted.middle = scales.middle.data(),
    wanted.mass_scale = &scales.mass_scale, wanted.weights = mass();
    const int64_t blocks = cuda::divide_rows(wanted, shape, 2);
    emulation::launch(static_cast<unsigned>(blocks), 96, cuda::row_sums<T, false, Center>, given.x.data(),
                      shape, wanted);
  }

  // Returns the inertia of at most 32 * 64 rows, because one block adds up their squares.
  double inertia() const {
    std::vector<double> squares(given.n, NAN);
    double total = NAN;
    emulation::launch(2, 64, cuda::row_squares<T, Center>, given.x.data(), shape, centers.data(),
                      labels.data(), mass(), squares.data());
    const auto size = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(given.n)));
    emulation::launch(1, 64, cuda::fold, squares.data(), given.n, std::max<int64_t>(size / cuda::kFolded, 1),
                      &total);
    return total * scales.weight_unit;
  }

  void advance(bool follow, double limit, unsigned blocks = 3) {
    cuda::Lloyd<Center> fit{follow ? previous.data() : nullptr,
                            labels.data(),
                            scales.middle.data(),
                            scales.scale.data(),
                            mass(),
                            &scales.mass_scale,
                            &limit,
                            given.spherical,
                            centers.data(),
                            masses.data(),
                            sums.data(),
                            keys.data(),
                            farthest.data(),
                            shifts.data(),
                            &iterations,
                            &ended};
    emulation::launch_cooperative(blocks, 64, cuda::advance<T, Center>, given.x.data(), shape, fit);
  }
};

// Runs the fit twice, with sums of all rows and with sums that follow the changes. Both must have the same
// bits after each iteration.
template <class T>
static LloydFit<T> run_both(const char* what, const LloydProblem<T>& given, int64_t most, unsigned blocks) {
  LloydFit<T> follows(given), sums(given);
  for (int64_t i = 0; i < most && !follows.ended; ++i) {
    follows.search(), sums.search();
    sums.sum();
    if (i == 0) follows.sum();
    follows.advance(i > 0, 0, blocks), sums.advance(false, 0, blocks);
    CHECK(same(follows.sums, sums.sums) && same(follows.masses, sums.masses), "%s: sums after %ld", what,
          static_cast<long>(i));
    CHECK(same(follows.centers, sums.centers) && follows.ended == sums.ended, "%s: centers after %ld", what,
          static_cast<long>(i));
  }
  return follows;
}

template <class T>
static void equals_the_cpu(const char* what, const LloydProblem<T>& given, int64_t most = 300,
                           unsigned blocks = 3) {
  std::vector<typename LloydProblem<T>::Center> centers(given.k * given.d);
  std::vector<int64_t> labels(given.n);
  double inertia = 0;
  int64_t iterations = 0;
  cpu::kmeans({given.rows(), given.weights.empty() ? nullptr : given.weights.data(), given.init.data(),
               given.k, 0, centers.data(), labels.data(), &inertia, &iterations},
              {cpu::Seeding::given, given.spherical, 1, most, 0}, cpu::on_this_thread);
  LloydFit<T> found = run_both(what, given, most, blocks);
  found.search();
  CHECK(found.iterations == iterations, "%s: %lld iterations, expected %ld", what, found.iterations,
        static_cast<long>(iterations));
  CHECK(same(found.centers, centers), "%s: centers", what);
  CHECK(found.labels == labels, "%s: labels", what);
  CHECK(found.inertia() == inertia, "%s: inertia %a, expected %a", what, found.inertia(), inertia);
}

static void fits() {
  equals_the_cpu("one row", LloydProblem<float>(1, 1, 1, 1));
  equals_the_cpu("one cluster", LloydProblem<float>(70, 9, 1, 2));
  equals_the_cpu("clusters", LloydProblem<float>(150, 5, 7, 3));
  equals_the_cpu("one block", LloydProblem<float>(150, 5, 7, 3), 300, 1);
  equals_the_cpu("long rows", LloydProblem<float>(90, 70, 5, 4));
  equals_the_cpu("many clusters", LloydProblem<float>(200, 3, 70, 5));
  equals_the_cpu("a cluster a row", LloydProblem<float>(40, 3, 40, 6));
  equals_the_cpu("float64", LloydProblem<double>(120, 11, 6, 7));
  equals_the_cpu("float16", LloydProblem<_Float16>(120, 11, 6, 8));
  equals_the_cpu("bfloat16", LloydProblem<emulation::Bfloat16>(120, 11, 6, 9));
  equals_the_cpu("elements apart", LloydProblem<float>(120, 9, 6, 10, 3));
  equals_the_cpu("weights", LloydProblem<float>(150, 5, 7, 11).weigh());
  equals_the_cpu("sphere", LloydProblem<float>(150, 5, 7, 12).on_sphere());
  equals_the_cpu("weights on a sphere", LloydProblem<double>(150, 5, 7, 13).on_sphere().weigh());
  equals_the_cpu("one iteration", LloydProblem<float>(150, 5, 7, 14), 1);
}

static void empty_clusters() {
  equals_the_cpu("empty", LloydProblem<float>(150, 5, 7, 15).far(3));
  equals_the_cpu("almost all empty", LloydProblem<float>(64, 4, 30, 16).far(29));
  equals_the_cpu("empty and weights", LloydProblem<float>(150, 5, 7, 17).far(3).weigh());
  equals_the_cpu("empty on a sphere", LloydProblem<float>(70, 3, 6, 18).far(3).on_sphere());
  equals_the_cpu("empty float64", LloydProblem<double>(65, 2, 5, 19).far(2));
  LloydProblem<float> repeated(90, 2, 12, 20);  // three different rows for twelve clusters
  for (int64_t i = 6; i < 180; ++i) repeated.x[i] = repeated.x[i % 6];
  equals_the_cpu("duplicates", repeated);
  equals_the_cpu("far duplicates", repeated.far(11));
  LloydProblem<float> still(10, 2, 4, 24);  // one row is not at its center
  std::fill(still.x.begin(), still.x.end() - 1, 0.0f);
  std::fill(still.init.begin(), still.init.end(), 0.0f);
  equals_the_cpu("more empty clusters than rows for them", still.far(3));
  LloydProblem<float> opposite(8, 1, 1, 21);  // directions that cancel, so that the mean has no direction
  for (int64_t i = 0; i < 8; ++i) opposite.x[i] = i % 2 ? 1.0f : -1.0f;
  opposite.init = {1};
  equals_the_cpu("no direction", opposite.on_sphere());
}

// Runs the cases that the CPU rejects: fewer rows than clusters, and rows that are not finite. The sums have
// no meaning there, but they must still be equal.
static void rows_that_are_refused() {
  run_both("fewer rows than clusters", LloydProblem<float>(3, 2, 6, 22).far(5), 20, 2);
  for (const double bad : {double{NAN}, double{INFINITY}, -double{INFINITY}}) {
    LloydProblem<float> given(100, 5, 6, 23);
    given.x[37 * 5 + 2] = static_cast<float>(bad);
    run_both("not finite", given, 8, 3);
    run_both("not finite, empty", given.far(3), 8, 3);
  }
}

// A fit ends at a shift of the limit or at NaN. Later iterations change nothing.
static void ends() {
  const LloydProblem<float> given(60, 2, 37, 24);
  LloydFit<float> one(given);
  one.search(), one.sum(), one.advance(false, 0);
  double shift = 0;
  std::vector<double> squares(64);
  for (int64_t i = 0; i < 37; ++i) {
    double part[2];
    for (int64_t j = 0; j < 2; ++j) {
      const double moved = static_cast<double>(one.centers[2 * i + j]) - given.init[2 * i + j];
      part[j] = moved * moved;
    }
    squares[i] = part[0] + part[1];
  }
  for (size_t half = 32; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) squares[i] += squares[i + half];
  }
  shift = squares[0];
  const auto ended = [&](double limit) {
    LloydFit<float> fit(given);
    fit.search(), fit.sum(), fit.advance(false, limit);
    CHECK(fit.iterations == 1 && same(fit.centers, one.centers), "limit %g", limit);
    const LloydFit<float> before = fit;
    if (fit.ended) {
      fit.search(), fit.advance(true, 0);
      CHECK(fit.iterations == 1 && same(fit.centers, before.centers) && same(fit.sums, before.sums),
            "an iteration after the end");
    }
    return fit.ended != 0;
  };
  CHECK(shift > 0 && ended(shift) && ended(2 * shift) && !ended(std::nextafter(shift, 0.0)), "shift %g",
        shift);
  CHECK(ended(NAN), "no end at NaN");
}

void run() {
  fits();
  empty_clusters();
  rows_that_are_refused();
  ends();
}
