// Compares k-means with a plain Lloyd's algorithm: steps, threads, seeding, empty clusters.
#include <array>
#include <cmath>
#include <numeric>

#include "check.h"
#include "cpu/features.h"
#include "cpu/kmeans.h"
#include "cpu/kmeans_bounds.h"
#include "cpu/kmeans_seeding.h"
#include "cpu/threads.h"

using namespace uefl::cpu;

static StridedRows dense(const std::vector<float>& x, int64_t n, int64_t d) {
  return {x.data(), Dtype::f32, n, 1, d, d, 0, 1};
}

static void alone(int64_t count, const std::function<void(int64_t, int64_t)>& work) { work(0, count); }

static Parallel threads(int64_t number) {
  return [number](int64_t count, const std::function<void(int64_t, int64_t)>& work) {
    on_threads(number, [&](int64_t thread) { work(count * thread / number, count * (thread + 1) / number); });
  };
}

struct FitOutcome {
  std::vector<float> centers;
  std::vector<int64_t> labels;
  double inertia = 0;
  int64_t iterations = 0;

  bool operator==(const FitOutcome&) const = default;
};

static FitOutcome fit(const StridedRows& x, int64_t k, KMeansOptions options, const float* init,
                      const Parallel& parallel, uint64_t seed = 0) {
  FitOutcome out{std::vector<float>(k * x.dim), std::vector<int64_t>(x.outer)};
  kmeans({x, nullptr, init, k, seed, {out.centers.data(), out.labels.data(), &out.inertia, &out.iterations}},
         options, parallel);
  return out;
}

// Makes rows around a few points, in random order.
static std::vector<float> groups(int64_t n, int64_t d, int64_t count, std::mt19937& random) {
  const auto points = normal<float>(count * d, random, 0, 6);
  auto x = normal<float>(n * d, random);
  for (int64_t i = 0; i < n * d; ++i) x[i] += points[i / d * 7 % count * d + i % d];
  return x;
}

static void is_lloyds_algorithm(int64_t n, int64_t d, int64_t k) {
  std::mt19937 random(1);
  const auto x = groups(n, d, 3 * k, random);
  std::vector<float> centers(x.begin(), x.begin() + k * d);
  const FitOutcome found = fit(dense(x, n, d), k, {Seeding::given, false, 1, 300, 0}, x.data(), alone);
  for (int64_t round = 0; round < found.iterations; ++round) {
    std::vector<double> sums(k * d);
    std::vector<int64_t> counts(k);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t label = nearest(&x[i * d], 1, centers.data(), k, d);
      ++counts[label];
      for (int64_t j = 0; j < d; ++j) sums[label * d + j] += x[i * d + j];
    }
    for (int64_t i = 0; i < k * d; ++i)
      centers[i] = static_cast<float>(sums[i] / static_cast<double>(counts[i / d]));
  }
  double inertia = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t label = nearest(&x[i * d], 1, centers.data(), k, d);
    CHECK(found.labels[i] == label, "row %ld", static_cast<long>(i));
    for (int64_t j = 0; j < d; ++j)
      inertia += std::pow(static_cast<double>(x[i * d + j]) - centers[label * d + j], 2);
  }
  CHECK(found.iterations > 1 && found.iterations < 300, "%ld iterations",
        static_cast<long>(found.iterations));
  for (int64_t i = 0; i < k * d; ++i)
    CHECK(std::fabs(found.centers[i] - centers[i]) < 1e-5, "center %ld", static_cast<long>(i));
  CHECK(std::fabs(found.inertia - inertia) < 1e-6 * inertia, "inertia %g, expected %g", found.inertia,
        inertia);
}

static void threads_change_nothing(int64_t n, int64_t d, int64_t k) {
  std::mt19937 random(2);
  const auto x = groups(n, d, 12, random);
  for (const Seeding seeding : {Seeding::random, Seeding::plus_plus, Seeding::parallel}) {
    const KMeansOptions options{seeding, false, 2, 20, 1e-4};
    const FitOutcome expected = fit(dense(x, n, d), k, options, nullptr, alone, 5);
    for (const int64_t number : {2, 3, 7}) {
      CHECK(fit(dense(x, n, d), k, options, nullptr, threads(number), 5) == expected, "%ld threads",
            static_cast<long>(number));
    }
  }
}

// Labels from bounds equal the definition while centers converge, with ties, jumps, and numbers that overflow
// float32.
template <class T>
static void bounds_find_the_nearest(double scale) {
  std::mt19937 random(8);
  for (const auto& [d, k] : {std::pair<int64_t, int64_t>{3, 5}, {19, 70}, {130, 64}}) {
    const int64_t n = 1200;
    auto x = normal<T>(n * d, random, 3 * scale, scale);
    std::copy_n(x.begin(), 5 * d, x.begin() + 5 * d);
    KMeansCenters centers(k, d, sizeof(T) == 8);
    const auto step = normal<double>(k * d, random, 0, scale);
    std::vector<double> values(d);
    const auto place = [&](int64_t c, double far) {
      for (int64_t j = 0; j < d; ++j) values[j] = static_cast<double>(x[c * d + j]) + far * step[c * d + j];
      centers.set(c, values.data());
    };
    for (int64_t c = 0; c < k; ++c) place(c, 1);
    const Dense rows{reinterpret_cast<const char*>(x.data()), sizeof(T) == 8, n, d};
    KMeansBounds bounds(rows, 1, centers, threads(2));
    std::vector<int64_t> labels(n, k - 1);
    int64_t scored = 0;
    for (int round = 0; round < 8; ++round) {
      if (round >= 2 && round < 5) {  // so near the first center that float32 scores do not tell them apart
        centers.widen(0, values.data());
        for (int64_t j = 0; j < d; ++j) values[j] *= 1 + std::ldexp((j + round) % 3 - 1, -23);
        centers.set(1, values.data());
      }
      if (round == 5) place(2, -2);
      if (round == 6) {  // as near as the first center for all rows
        centers.widen(0, values.data());
        centers.set(1, values.data());
      }
      bounds.follow(centers, threads(2));
      scored += bounds.assign(0, n / 3, labels.data()) + bounds.assign(n / 3, n, labels.data());
      for (int64_t i = 0; i < n; ++i) {
        const int64_t expected = nearest(&x[i * d], 1, reinterpret_cast<const T*>(centers.data()), k, d);
        CHECK(labels[i] == expected, "scale %g, d %ld, round %d, row %ld: %ld, expected %ld", scale,
              static_cast<long>(d), round, static_cast<long>(i), static_cast<long>(labels[i]),
              static_cast<long>(expected));
      }
      for (int64_t c = 3; c < k; ++c) place(c, std::ldexp(1, -2 * round));
    }
    if (scale == 1) CHECK(scored < 6 * n * k, "d %ld: nothing is ruled out", static_cast<long>(d));
  }
}

// Distances to all centers have the bits of the distance to one. Scores are within their bound.
template <class T>
static void distances_to_all_centers() {
  std::mt19937 random(9);
  for (const int64_t d : {1, 7, 8, 21, 512, 1029}) {
    const int64_t n = 19, k = 23;
    const auto x = normal<T>(n * d, random), narrow = normal<T>(k * d, random);
    const std::vector<double> centers(narrow.begin(), narrow.end());
    const Dense rows{reinterpret_cast<const char*>(x.data()), sizeof(T) == 8, n, d};
    for (const auto& [lo, hi, count] : {std::array<int64_t, 3>{0, n, k}, {3, 4, 6}, {2, 13, 1}}) {
      std::vector<double> exact((hi - lo) * count), close(exact);
      kmeans_kernel().distances(rows, lo, hi, centers.data(), count, exact.data());
      kmeans_kernel().scores(rows, lo, hi, reinterpret_cast<const char*>(narrow.data()), count, close.data());
      for (int64_t i = 0; i < (hi - lo) * count; ++i) {
        const char* const center = reinterpret_cast<const char*>(&narrow[i % count * d]);
        const double wanted = kmeans_kernel().distance(rows, lo + i / count, center);
        CHECK(exact[i] == wanted, "d %ld, distance %ld", static_cast<long>(d), static_cast<long>(i));
        const double error =
            2.1 * static_cast<double>(d + 8) * 0x1p-53 + (sizeof(T) == 4 ? kmeans_kernel().float_error : 0);
        CHECK(std::fabs(close[i] - wanted) <= error * wanted, "d %ld, score %ld", static_cast<long>(d),
              static_cast<long>(i));
      }
    }
  }
}

// Compares a step from the labels of another step with a step from no labels.
static void steps_add_up() {
  std::mt19937 random(3);
  const int64_t n = 500, d = 21, k = 11;
  const auto x = normal<double>(n * d, random);
  const std::vector<double> middle(d, 0.25), scale(d, 0x1p40), weights(n, 0.5);
  const KMeansUnits units{{middle.data(), scale.data()}, weights.data(), 0x1p50};
  const StridedRows rows{x.data(), Dtype::f64, n, 1, d, d, 0, 1};
  const auto step = [&](const std::vector<double>& centers, const Parallel& parallel,
                        std::vector<int64_t>& labels, KMeansTotals& totals) {
    const Search search({centers.data(), Dtype::f64, 1, k, d}, Metric::l2, true);
    std::vector<double> distances(n);
    const bool changed =
        kmeans_step(rows, search, centers.data(), units, parallel, labels.data(), totals, distances.data());
    for (int64_t i = 0; i < n; ++i) {
      double expected = 0;
      for (int64_t j = 0; j < d; ++j) expected += std::pow(x[i * d + j] - centers[labels[i] * d + j], 2);
      CHECK(std::fabs(distances[i] - expected) <= 1e-14 * expected, "distance %ld", static_cast<long>(i));
    }
    return changed;
  };
  const auto first = normal<double>(k * d, random), second = normal<double>(k * d, random);
  std::vector<int64_t> followed(n, -1), anew(n, -1);
  KMeansTotals after(k, d), expected(k, d);
  step(first, alone, followed, after);
  CHECK(step(second, threads(3), followed, after), "no label changed");
  CHECK(!step(second, threads(2), followed, after), "a label changed");
  step(second, alone, anew, expected);
  CHECK(followed == anew && after.sums == expected.sums && after.masses == expected.masses,
        "a step depends on the one before");
  CHECK(std::accumulate(after.masses.begin(), after.masses.end(), int64_t{0}) == n << 49,
        "the rows do not weigh a half each");
  LargeVector<int64_t> sums(k * d);
  for (int64_t i = 0; i < n * d; ++i) {
    sums[anew[i / d] * d + i % d] += std::llrint((x[i] - middle[i % d]) * weights[i / d] * scale[i % d]);
  }
  CHECK(sums == expected.sums, "sums");
}

// Checks strided rows: elements of a row apart, and rows in reverse.
static void rows_without_density() {
  std::mt19937 random(4);
  const int64_t n = 300, d = 6, k = 5;
  const auto x = groups(n, d, k, random);
  std::vector<float> apart(n * d);
  for (int64_t i = 0; i < n * d; ++i) apart[i % d * n + (n - 1 - i / d)] = x[i];
  const KMeansOptions options{Seeding::plus_plus, true, 1, 50, 1e-4};
  const StridedRows view{apart.data() + n - 1, Dtype::f32, n, 1, d, -1, 0, n};
  CHECK(fit(view, k, options, nullptr, threads(2)) == fit(dense(x, n, d), k, options, nullptr, alone),
        "strides change the result");
}

static void empty_clusters_take_the_farthest_rows() {
  const std::vector<float> x{0, 1, 2, 50, 100}, init{1, 1e4, 2e4};
  const FitOutcome found = fit(dense(x, 5, 1), 3, {Seeding::given, false, 1, 1, 0}, init.data(), alone);
  CHECK(found.centers == std::vector<float>({1, 100, 50}), "got %g, %g and %g", found.centers[0],
        found.centers[1], found.centers[2]);
  CHECK(found.inertia == 2, "got %g", found.inertia);
}

static const SeedingKernel& seeding() {
#if defined(__x86_64__)
  const SeedingKernel* const kernels[] = {&seeding_portable, &seeding_avx2, &seeding_avx512,
                                          &seeding_avx512vnni, &seeding_amx};
  return *kernels[static_cast<int>(isa())];
#else
  return seeding_portable;
#endif
}

// Compares the largest sums of squares of runs with their definition.
static void squares_of_runs() {
  std::mt19937 random(5);
  for (const int64_t d : {1, 3, 4, 9, 64, 1000, 1024, 1030, 5000, 40000}) {
    std::vector<int16_t> values((d + 3) / 4 * 4);
    for (int64_t j = 0; j < d; ++j)
      values[j] = static_cast<int16_t>(static_cast<int>(random() % 65279) - 32639);
    int64_t largest[kRunLevels] = {}, all = 0;
    const int64_t found = kmeans_kernel().squares(values.data(), d, largest);
    for (int level = 2; level < kRunLevels; ++level) {
      int64_t expected = 0, sum = 0;
      for (int64_t j = 0; j < d; ++j) {
        if (j % (int64_t{1} << level) == 0) sum = 0;
        sum += values[j] * values[j];
        expected = std::max(expected, sum);
      }
      CHECK(largest[level] == expected, "d %ld, runs of 2^%d: %ld, expected %ld", static_cast<long>(d), level,
            static_cast<long>(largest[level]), static_cast<long>(expected));
    }
    for (int64_t j = 0; j < d; ++j) all += values[j] * values[j];
    CHECK(found == all, "d %ld: %ld, expected %ld", static_cast<long>(d), static_cast<long>(found),
          static_cast<long>(all));
  }
}

// Checks integer rows, random and with the extremes of their digits, for which 32-bit sums come closest to
// overflow.
static void distances_of_whole_numbers(int most) {
  std::mt19937 random(6);
  for (const int64_t d : {1, 2, 31, 64, 513, 1100, 5000}) {
    const int64_t n = 93, first = 32, count = n - first, room = 96;
    std::vector<int16_t> x(n * d);
    for (int64_t i = 0; i < n * d; ++i) {
      const int ends[] = {-most, most, 128 - most, 127, -128};
      x[i] = static_cast<int16_t>(i / d % 3 == 0 ? static_cast<int>(random() % (2 * most + 1)) - most
                                                 : ends[i / d % 5]);
    }
    std::vector<CacheLine> row_lines(room * seeding().row_bytes(d) / 64),
        group_lines(seeding().group_bytes(d) / 64);
    char *const rows = row_lines[0].bytes, *const group = group_lines[0].bytes;
    std::vector<int64_t> norms(n), group_norms(kGroup);
    std::vector<int16_t> values((d + 3) / 4 * 4), loaded(d);
    int64_t largest[kRunLevels] = {}, run = 2;
    for (int64_t i = 0; i < n; ++i) {
      std::copy_n(&x[i * d], d, values.begin());
      norms[i] = kmeans_kernel().squares(values.data(), d, largest);
      seeding().store(values.data(), d, i, rows);
    }
    for (int level = 2; level < kRunLevels && largest[level] < int64_t{1} << 31; ++level)
      run = int64_t{1} << level;
    for (int64_t i = 0; i < n; ++i) {
      seeding().load(rows, d, i, loaded.data());
      CHECK(std::equal(loaded.begin(), loaded.end(), &x[i * d]), "row %ld of %ld elements",
            static_cast<long>(i), static_cast<long>(d));
    }
    for (int64_t c = 0; c < kGroup; ++c) {
      seeding().pack(&x[c * d], d, c, group);
      group_norms[c] = norms[c];
    }
    for (int64_t candidates = 1; candidates <= kGroup; ++candidates) {
      std::vector<int64_t> distances(kGroup * count, -1);
      int64_t* out[kGroup];
      for (int64_t c = 0; c < kGroup; ++c) out[c] = &distances[c * count];
      seeding().distances(rows, norms.data(), first, count, d, run, group, group_norms.data(), candidates,
                          out);
      for (int64_t i = 0; i < count * kGroup; ++i) {
        int64_t expected = 0;
        for (int64_t j = 0; j < d; ++j) {
          const int64_t difference = x[(first + i % count) * d + j] - x[i / count * d + j];
          expected += difference * difference;
        }
        if (i / count >= candidates) expected = -1;
        CHECK(distances[i] == expected, "d %ld, most %d, %ld candidates, pair %ld: %ld, expected %ld",
              static_cast<long>(d), most, static_cast<long>(candidates), static_cast<long>(i),
              static_cast<long>(distances[i]), static_cast<long>(expected));
      }
    }
  }
}

static void values_that_are_refused() {
  for (const float bad : {NAN, INFINITY}) {
    const std::vector<float> x{0, 1, bad, 3};
    bool caught = false;
    try {
      fit(dense(x, 4, 1), 2, {Seeding::plus_plus, false, 1, 10, 0}, nullptr, threads(2));
    } catch (const std::runtime_error& error) {
      caught = std::string(error.what()).find("kmeans: x holds NaN or infinity") == 0;
    }
    CHECK(caught, "%g was not refused", bad);
  }
}

void run() {
  is_lloyds_algorithm(4200, 70, 8);   // here bounds skip some distances
  is_lloyds_algorithm(130, 1101, 7);  // wide rows
  threads_change_nothing(4200, 70, 30);
  threads_change_nothing(130, 1101, 7);
  for (const double scale : {1.0, 1e-30, 1e15, 1e25}) bounds_find_the_nearest<float>(scale);
  for (const double scale : {1.0, 1e-200, 1e25, 1e100}) bounds_find_the_nearest<double>(scale);
  distances_to_all_centers<float>();
  distances_to_all_centers<double>();
  steps_add_up();
  rows_without_density();
  empty_clusters_take_the_farthest_rows();
  squares_of_runs();
  for (const int most : {500, 1 << kSeedingBits, 32639}) distances_of_whole_numbers(most);
  values_that_are_refused();
}
