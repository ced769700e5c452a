// SPDX-License-Identifier: Apache-2.0
// SuffixCache under ThreadSanitizer: two host threads and a watcher call one cache, whose steps use
// four threads. It adds long prompts in the background and is always full. Prints errors.
//
//   suffix_threads [seconds]
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common/parallel.h"
#include "suffix_tree/suffix_cache.h"

namespace {

using specops::SuffixCache;

constexpr int64_t kBatch = 24;
constexpr int64_t kWidth = 3;
constexpr int64_t kCapacity = 8;

void require(bool condition, const std::string& what) {
  if (condition) return;
  std::printf("failed: %s\n", what.c_str());
  std::fflush(stdout);
  _exit(1);
}

// Returns text with much repetition: pieces of a common text, and now and then a new token.
class Text {
 public:
  explicit Text(uint64_t seed) : random_(seed) {}
  int32_t next() {
    if (random_() % 40 == 0) place_ = random_() % 5000;
    if (random_() % 60 == 0) return static_cast<int32_t>(random_() % 100);
    uint64_t x = (place_++ + 1) * 0x9e3779b97f4a7c15u;
    return static_cast<int32_t>((x >> 40) % 50);
  }
  std::vector<int32_t> next(size_t size) {
    std::vector<int32_t> ids(size);
    for (int32_t& id : ids) id = next();
    return ids;
  }
  uint64_t random() { return random_(); }

 private:
  std::mt19937_64 random_;
  uint64_t place_ = 0;
};

// Simulates one engine, which starts, steps and stops its own requests.
void engine(SuffixCache& cache, uint64_t seed, const std::atomic<bool>& is_over) {
  Text text(seed);
  std::vector<int64_t> requests(kBatch, -1);
  for (int64_t number = 0; !is_over; ++number) {
    for (int64_t& request : requests) {
      if (request >= 0 && text.random() % 50 == 0) {
        cache.stop(request);
        request = -1;
      }
      if (request < 0 && text.random() % 4 == 0) {
        std::vector<int32_t> prompt = text.next(text.random() % 5 == 0 ? 700 : 30);
        request = cache.start(prompt.data(), static_cast<int64_t>(prompt.size()));
        std::vector<int32_t> more = text.next(3);  // while the prompt is being built
        cache.extend(request, more.data(), 3);
      }
    }
    std::vector<int32_t> new_ids = text.next(kBatch * kWidth), num_new(kBatch), limits(kBatch);
    std::vector<int32_t> drafts(kBatch * kCapacity), parents(drafts), num_drafts(kBatch);
    std::vector<float> scores(kBatch);
    for (int32_t& num : num_new) num = static_cast<int32_t>(text.random() % (kWidth + 1));
    for (int32_t& limit : limits) limit = static_cast<int32_t>(text.random() % (kCapacity + 1));
    specops::SuffixStepParams params{};
    params.requests = requests.data();
    params.new_token_ids = new_ids.data();
    params.num_new_tokens = num_new.data();
    params.max_draft_tokens = limits.data();
    params.draft_token_ids = drafts.data();
    params.num_draft_tokens = num_drafts.data();
    params.parents = parents.data();
    params.scores = scores.data();
    params.batch = kBatch;
    params.new_stride = kWidth;
    params.draft_stride = params.parents_stride = params.capacity = kCapacity;
    params.options.use_tree = number % 2 == 1;
    cache.step(params);
    for (int64_t b = 0; b < kBatch; ++b) {
      require(num_drafts[b] >= 0 && num_drafts[b] <= limits[b],
              "num_draft_tokens within the limit");
      for (int64_t i = 0; i < kCapacity; ++i) {
        int32_t parent = parents[b * kCapacity + i];
        bool is_draft = i < num_drafts[b];
        require(is_draft == (drafts[b * kCapacity + i] >= 0), "drafts, then -1");
        require(is_draft ? parent >= -1 && parent < i : parent == -2,
                "parents before their children");
      }
    }
    if (number % 30 == 29) cache.wait();
  }
  for (int64_t request : requests) {
    if (request >= 0) cache.stop(request);
  }
}

// Calls all queries beside the engines.
void watcher(SuffixCache& cache, const std::string& path, const std::atomic<bool>& is_over) {
  Text text(3);
  while (!is_over) {
    std::vector<int32_t> ids = text.next(5);
    (void)cache.count(ids.data(), 5, -1);
    (void)cache.num_bytes();
    (void)cache.num_cached_tokens();
    (void)cache.is_busy();
    for (int64_t request : cache.running()) {
      (void)cache.is_building(request);
      specops::DraftOptions options;
      options.max_draft_tokens = 4;
      int32_t drafts[4];
      specops::SuffixDraft draft;
      draft.token_ids = drafts;
      try {
        cache.speculate(request, options, draft);
      } catch (const std::invalid_argument&) {  // the request was stopped meanwhile
      }
    }
    ids = text.next(200);
    cache.add(ids.data(), 200, nullptr);
    std::vector<int64_t> cached = cache.cached();
    try {
      if (!cached.empty()) cache.evict(cached[text.random() % cached.size()]);
    } catch (const std::invalid_argument&) {
    }
    if (text.random() % 8 == 0) cache.reclaim();
    if (text.random() % 20 == 0) cache.save(path);
    std::string problem = text.random() % 5 == 0 ? cache.check_integrity() : "";
    require(problem.empty(), problem);
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
  }
}

}  // namespace

int main(int argc, char** argv) {
  double seconds = argc > 1 ? std::atof(argv[1]) : 10;
  specops::set_num_threads(4);
  std::string path = "/tmp/specops_suffix_threads_" + std::to_string(getpid());
  {
    specops::SuffixCacheOptions options;
    options.max_tree_depth = 16;
    options.max_cached_tokens = 6000;
    options.max_cached_requests = 60;
    options.background_tokens = 400;
    SuffixCache cache(options);
    std::atomic<bool> is_over{false};
    std::thread one([&] { engine(cache, 1, is_over); });
    std::thread two([&] { engine(cache, 2, is_over); });
    std::thread beside([&] { watcher(cache, path, is_over); });
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    is_over = true;
    one.join();
    two.join();
    beside.join();
    std::string problem = cache.check_integrity();
    require(problem.empty(), problem);
    require(cache.num_cached_tokens() <= 6000 && cache.num_cached_requests() <= 60, "the budgets");
    // The cache is destroyed while a prompt is being built.
    std::vector<int32_t> prompt = Text(9).next(20000);
    cache.start(prompt.data(), static_cast<int64_t>(prompt.size()));
  }
  unlink(path.c_str());
  return 0;
}
