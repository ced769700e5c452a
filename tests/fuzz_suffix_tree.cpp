// SPDX-License-Identifier: Apache-2.0
// Turns bytes into operations on a SuffixTree, a SuffixCache or its file, and checks them by brute
// force.
//
// With clang, -fsanitize=fuzzer -DSPECOPS_LIBFUZZER makes a libFuzzer target. Otherwise
//
//   fuzz_suffix_tree [seconds [seed [first input]]]
//
// generates inputs, each from the seed and its number; a failing input is shrunk and printed.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>

#include "common/parallel.h"
#include "suffix_model.h"
#include "suffix_tree/suffix_file.h"

namespace specops {
namespace {

const std::string kScope;  // scope of all requests here

std::string journal;  // operations of the running input

struct Failure : std::logic_error {
  using std::logic_error::logic_error;
};

void require(bool condition, const std::string& what) {
  if (!condition) throw Failure(what);
}

std::string text(float value) {
  char digits[32];
  std::snprintf(digits, sizeof(digits), "%.9g", static_cast<double>(value));
  return digits;
}
std::string text(int64_t value) { return std::to_string(value); }
std::string text(int32_t value) { return std::to_string(value); }

template <typename Range>
std::string text(const Range& values) {
  std::string out = "[";
  for (auto value : values) out += (out.size() > 1 ? " " : "") + text(value);
  return out + "]";
}

void note(const std::string& operation) { journal += operation + "\n"; }

// The bytes still to be decoded, followed by zeros.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), end_(data + size) {}
  bool is_empty() const { return data_ == end_; }
  uint32_t below(uint32_t limit) { return limit < 2 || data_ == end_ ? 0 : *data_++ % limit; }
  template <typename T, size_t kSize>
  T pick(const T (&choices)[kSize]) {
    return choices[below(kSize)];
  }

 private:
  const uint8_t* data_;
  const uint8_t* end_;
};

constexpr int32_t kDepths[] = {1, 2, 3, 4, 5, 6, 9, 64};
constexpr size_t kMaxTokens = 240;  // brute force is quadratic

DraftOptions draw_options(Input& input) {
  DraftOptions options;
  options.max_draft_tokens = input.pick({8, 0, 1, 2, 5, 16, 40});
  options.max_spec_factor = input.pick({1.0f, 0.0f, 0.5f, 1.7f, 4.0f, 1e30f, -1.0f});
  options.max_spec_offset = input.pick({0.0f, 0.0f, 1.0f, 2.5f, -1.0f});
  options.min_token_prob = input.pick({0.1f, 0.0f, 0.3f, 0.5f, 1.0f});
  options.use_tree = input.below(2) == 1;
  options.read_on = input.below(3) != 1;
  return options;
}

std::string text(const DraftOptions& options) {
  return "max_draft_tokens=" + std::to_string(options.max_draft_tokens) +
         " factor=" + text(options.max_spec_factor) + " offset=" + text(options.max_spec_offset) +
         " min_prob=" + text(options.min_token_prob) + (options.use_tree ? " tree" : " path") +
         (options.read_on ? " read_on" : "");
}

std::string text(const ModelDraft& draft) {
  return text(draft.token_ids) + " parents " + text(draft.parents) + " probs " + text(draft.probs) +
         " score " + text(draft.score) + " match_len " + std::to_string(draft.match_len);
}

// Buffer of a draft with a canary behind it.
struct DraftBuffer {
  static constexpr int32_t kCanary = -77;
  explicit DraftBuffer(int32_t capacity)
      : token_ids(capacity + 1, kCanary),
        parents(capacity + 1, kCanary),
        probs(capacity + 1, -77.0f) {
    draft.token_ids = token_ids.data();
    draft.parents = parents.data();
    draft.probs = probs.data();
  }
  ModelDraft result() const {
    require(token_ids.back() == kCanary && parents.back() == kCanary && probs.back() == -77.0f,
            "a draft is written past its room");
    require(draft.size >= 0 && draft.size < static_cast<int32_t>(token_ids.size()),
            "size of a draft");
    ModelDraft got;
    got.token_ids.assign(token_ids.begin(), token_ids.begin() + draft.size);
    got.parents.assign(parents.begin(), parents.begin() + draft.size);
    got.probs.assign(probs.begin(), probs.begin() + draft.size);
    got.score = draft.score;
    got.match_len = draft.match_len;
    return got;
  }
  std::vector<int32_t> token_ids, parents;
  std::vector<float> probs;
  SuffixDraft draft;
};

void same_draft(const ModelDraft& got, const ModelDraft& want, const std::string& where) {
  require(got == want, where + "\n  got  " + text(got) + "\n  want " + text(want));
}

std::string scratch_file() {
  static const std::string path = (access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp") +
                                  std::string("/specops_fuzz_") + std::to_string(getpid());
  return path;
}

// Few distinct tokens give much repetition; many give large tables of children.
constexpr int32_t kAlphabets[] = {2, 1, 3, 4, 5, 12, 200};

std::vector<int32_t> draw_tokens(Input& input, int32_t alphabet, size_t size) {
  std::vector<int32_t> ids(size);
  for (int32_t& id : ids) {
    id = static_cast<int32_t>(input.below(alphabet));
    if (alphabet >= 12 && id % 2 == 1) id = INT32_MAX - 4096 * id;
  }
  return ids;
}

// ---- one tree ----

class TreeRun {
 public:
  explicit TreeRun(Input& input)
      : input_(input),
        max_depth_(input.pick(kDepths)),
        alphabet_(input.pick(kAlphabets)),
        tree_(std::make_unique<SuffixTree>(max_depth_)),
        model_(max_depth_) {
    note("tree: max_depth=" + std::to_string(max_depth_));
  }

  void run() {
    for (int op = 0; op < 300 && !input_.is_empty(); ++op) {
      one_operation();
      check();
      if (op % 8 == 7) check_counts();
    }
    check_counts();
    while (model_.num_tokens(true) > 0) {
      int64_t size = 1 + input_.below(9);
      require(tree_->reclaim(size) == model_.reclaim(size), "reclaim returns what it gave back");
      check();
    }
    check_counts();
  }

 private:
  void one_operation() {
    uint32_t op = input_.below(32);
    if (open_.empty() || op == 0) {
      start();
    } else if (op <= 9) {
      append(draw(open_), draw_tokens(input_, alphabet_, 1 + input_.below(6)));
    } else if (op <= 15) {
      follow();
    } else if (op <= 18) {
      lock_step();
    } else if (op == 19) {
      size_t place = input_.below(open_.size());
      note("finish " + std::to_string(open_[place]));
      tree_->finish(open_[place]);
      finished_.push_back(open_[place]);
      open_.erase(open_.begin() + place);
    } else if (op <= 22) {
      remove(false);
    } else if (op == 23) {
      remove(true);
    } else if (op <= 26) {
      int64_t size = input_.pick({1, 2, 3, 7, 1000});
      note("reclaim " + std::to_string(size));
      require(tree_->reclaim(size) == model_.reclaim(size), "reclaim returns what it gave back");
    } else if (op == 27 && input_.below(4) == 1) {
      note("clear");
      tree_->clear();
      model_.clear();
      open_.clear();
      finished_.clear();
    } else if (op == 28 && input_.below(2) == 1) {
      save_and_load();
    } else {
      speculate_anywhere();
    }
    while (static_cast<size_t>(model_.num_tokens()) > kMaxTokens) remove(true);
  }

  void start() {
    int32_t handle = tree_->start();
    note("start -> " + std::to_string(handle));
    for (const auto& sequence : model_.sequences()) {
      require(sequence.handle != handle, "a handle in use is given out again");
    }
    model_.start(handle);
    open_.push_back(handle);
  }

  int32_t draw(const std::vector<int32_t>& handles) {
    return handles[input_.below(handles.size())];
  }

  void append(int32_t handle, const std::vector<int32_t>& ids) {
    note("append " + std::to_string(handle) + " " + text(ids));
    tree_->append(handle, ids.data(), ids.size());
    model_.append(handle, ids);
  }

  // Appends to a sequence the tokens that another sequence has at the same place.
  void follow() {
    int32_t handle = draw(open_);
    const auto& sequences = model_.sequences();
    std::vector<int32_t> source = sequences[input_.below(sequences.size())].tokens;
    size_t from = std::min(model_.tokens(handle).size(), source.size());
    size_t size = std::min<size_t>(source.size() - from, 1 + input_.below(12));
    append(handle, {source.begin() + from, source.begin() + from + size});
  }

  // Appends the same text to two or more sequences, a few tokens at a time, in any order.
  void lock_step() {
    std::vector<int32_t> ids = draw_tokens(input_, alphabet_, 1 + input_.below(4));
    for (int32_t handle : std::vector<int32_t>(open_)) {
      if (input_.below(4) != 3) append(handle, ids);
    }
  }

  void remove(bool oldest) {
    std::vector<int32_t> handles;
    for (const auto& sequence : model_.sequences()) {
      if (!sequence.is_removed) handles.push_back(sequence.handle);
    }
    if (handles.empty()) return;
    int32_t handle = oldest ? handles[0] : draw(handles);
    note("remove " + std::to_string(handle));
    tree_->remove(handle);
    model_.remove(handle);
    std::erase(open_, handle);
    std::erase(finished_, handle);
  }

  void save_and_load() {
    if (input_.below(2) == 1) {
      require(tree_->reclaim(1 << 20) == model_.reclaim(1 << 20),
              "reclaim returns what it gave back");
    }
    note("save and load");
    {
      FileWriter file(scratch_file());
      tree_->save(file);
      file.finish();
    }
    auto loaded = std::make_unique<SuffixTree>(max_depth_);
    FileReader file(scratch_file());
    loaded->load(file);
    file.finish();
    unlink(scratch_file().c_str());
    tree_ = std::move(loaded);
    // Nodes that wait to be freed may remain.
    tree_->reclaim(1 << 20);
    model_.reclaim(1 << 20);
    finished_.insert(finished_.end(), open_.begin(), open_.end());
    open_.clear();
  }

  void speculate_anywhere() {
    std::vector<int32_t> context = draw_tokens(input_, alphabet_, input_.below(6));
    const auto& sequences = model_.sequences();
    if (!sequences.empty() && input_.below(4) != 0) {  // after a piece of some text
      const auto& tokens = sequences[input_.below(sequences.size())].tokens;
      size_t end = input_.below(tokens.size() + 1), begin = input_.below(end + 1);
      context.insert(context.end(), tokens.begin() + begin, tokens.begin() + end);
    }
    speculate(-1, context);
  }

  void speculate(int32_t handle, const std::vector<int32_t>& context) {
    DraftOptions options = draw_options(input_);
    DraftBuffer buffer(options.max_draft_tokens);
    tree_->speculate(handle, context.data(), context.size(), options, buffer.draft);
    same_draft(buffer.result(),
               model_.speculate(context, options),
               "draft after " + text(context) + " of sequence " + std::to_string(handle) + ": " +
                   text(options));
  }

  void check() {
    std::string problem = tree_->check_integrity();
    require(problem.empty(), "check_integrity: " + problem);
    require(tree_->num_tokens() == model_.num_tokens(), "num_tokens");
    require(tree_->num_pending_tokens() == model_.num_tokens(true), "num_pending_tokens");
    require(tree_->num_sequences() == static_cast<int64_t>(open_.size() + finished_.size()),
            "num_sequences");
    for (int32_t handle : open_) {
      require(tree_->length(handle) == static_cast<int64_t>(model_.tokens(handle).size()),
              "length");
      speculate(handle, model_.tokens(handle));
      if (input_.below(8) == 7) speculate(-1, model_.tokens(handle));
    }
  }

  // Checks the counts of every string that occurs or has occurred, and of some other strings.
  void check_counts() {
    std::map<std::vector<int32_t>, int64_t> counts;
    for (const auto& sequence : model_.sequences()) {
      const auto& tokens = sequence.tokens;
      for (size_t i = 0; i < tokens.size(); ++i) {
        std::vector<int32_t> window;
        for (size_t j = i; j < tokens.size() && j <= i + max_depth_; ++j) {
          window.push_back(tokens[j]);
          counts[window] += i >= sequence.first && j < i + max_depth_;
        }
      }
    }
    for (int32_t id = 0; id <= alphabet_; ++id) counts[{id}];
    for (const auto& [window, count] : counts) {
      int64_t got = tree_->count(window.data(), window.size());
      require(got == count,
              "count of " + text(window) + ": got " + std::to_string(got) + ", want " +
                  std::to_string(count));
    }
  }

  Input& input_;
  int32_t max_depth_;
  int32_t alphabet_;
  std::unique_ptr<SuffixTree> tree_;
  ModelTree model_;
  std::vector<int32_t> open_, finished_;
};

// ---- a larger tree ----

// The text is too long to check everything after every operation, so a few points are checked.
class LargeRun {
 public:
  explicit LargeRun(Input& input)
      : input_(input),
        max_depth_(input.pick({4, 16, 64, 300})),
        tree_(max_depth_),
        model_(max_depth_) {
    random_.seed(input.below(256) << 16 | input.below(256) << 8 | input.below(256));
    note("larger tree: max_depth=" + std::to_string(max_depth_));
  }

  void run() {
    int32_t alphabet = input_.pick({30, 2, 300, 20000});
    int64_t most = input_.pick({2000, 2000, 2000, 20000});  // the last fills mapped arrays
    for (int32_t round = 0; round < 3; ++round) {
      while (model_.num_tokens() < most) {
        if (open_.size() < 3 || random_() % 30 == 0) start();
        int32_t handle = open_[random_() % open_.size()];
        std::vector<int32_t> ids(1 + random_() % 200);
        for (int32_t& id : ids) id = static_cast<int32_t>(random_() % (1 + random_() % alphabet));
        const auto& sequences = model_.sequences();
        const auto& source = sequences[random_() % sequences.size()].tokens;
        if (random_() % 4 != 0 && !source.empty()) {  // a copy of other text, with an error
          size_t begin = random_() % source.size();
          ids.assign(source.begin() + begin, source.begin() + std::min(begin + 400, source.size()));
          if (random_() % 2 == 0) ids[random_() % ids.size()] = alphabet;
        }
        append(handle, ids);
      }
      check();
      while (model_.num_tokens() > most * 2 / 5) {
        const auto& sequences = model_.sequences();
        size_t place = random_() % 3 == 0 ? random_() % sequences.size() : 0;
        while (sequences[place].is_removed) ++place;
        remove(sequences[place].handle);
        int64_t size = static_cast<int64_t>(random_() % 500);
        require(tree_.reclaim(size) == model_.reclaim(size), "reclaim returns what it gave back");
      }
      check();
    }
  }

 private:
  void start() {
    int32_t handle = tree_.start();
    model_.start(handle);
    open_.push_back(handle);
  }
  void append(int32_t handle, const std::vector<int32_t>& ids) {
    tree_.append(handle, ids.data(), ids.size());
    model_.append(handle, ids);
  }
  void remove(int32_t handle) {
    tree_.remove(handle);
    model_.remove(handle);
    std::erase(open_, handle);
  }

  void check() {
    std::string problem = tree_.check_integrity();
    require(problem.empty(), "check_integrity: " + problem);
    for (int32_t handle : open_) speculate(handle, model_.tokens(handle));
    for (int32_t i = 0; i < 20; ++i) {
      const auto& sequences = model_.sequences();
      const auto& tokens = sequences[random_() % sequences.size()].tokens;
      if (tokens.empty()) continue;
      size_t begin = random_() % tokens.size(), size = 1 + random_() % (max_depth_ + 2);
      std::vector<int32_t> ids(tokens.begin() + begin,
                               tokens.begin() + std::min(begin + size, tokens.size()));
      require(tree_.count(ids.data(), ids.size()) == model_.count(ids.data(), ids.size()),
              "count of " + text(ids));
      if (i % 4 == 0) speculate(-1, ids);
    }
  }
  void speculate(int32_t handle, const std::vector<int32_t>& context) {
    DraftOptions options;
    options.max_draft_tokens = 40;
    options.use_tree = random_() % 2 == 1;
    options.max_spec_factor = random_() % 2 == 1 ? 1.0f : 4.0f;
    DraftBuffer buffer(options.max_draft_tokens);
    tree_.speculate(handle, context.data(), context.size(), options, buffer.draft);
    same_draft(buffer.result(),
               model_.speculate(context, options),
               "draft of sequence " + std::to_string(handle) + ": " + text(options));
  }

  Input& input_;
  std::mt19937_64 random_;
  int32_t max_depth_;
  SuffixTree tree_;
  ModelTree model_;
  std::vector<int32_t> open_;
};

// ---- the cache ----

class CacheRun {
 public:
  explicit CacheRun(Input& input)
      : input_(input),
        alphabet_(input.pick(kAlphabets)),
        options_{.max_tree_depth = input.pick(kDepths),
                 .max_cached_requests = input.pick({-1, -1, 0, 1, 2, 3}),
                 .max_cached_tokens = input.pick({-1, -1, 0, 1, 9, 40}),
                 .max_cached_bytes = -1,
                 .background_tokens = input.pick({-1, 1, 6})},
        cache_(std::make_unique<SuffixCache>(options_)),
        model_(options_) {
    note("cache: max_tree_depth=" + std::to_string(options_.max_tree_depth) +
         " max_cached_requests=" + std::to_string(options_.max_cached_requests) +
         " max_cached_tokens=" + std::to_string(options_.max_cached_tokens) +
         " background_tokens=" + std::to_string(options_.background_tokens));
  }

  void run() {
    for (int op = 0; op < 200 && !input_.is_empty(); ++op) {
      set_num_threads(input_.pick({1, 2, 4}));
      one_operation();
      keep_small();
      check();
    }
    check_counts();
    note("reclaim");
    require(cache_->reclaim() == model_.reclaim(), "reclaim returns what it gave back");
    check();
    check_counts();
  }

  SuffixCache& cache() { return *cache_; }
  const SuffixCacheOptions& options() const { return options_; }

 private:
  void one_operation() {
    uint32_t op = input_.below(24);
    if (model_.running().empty() || op <= 1) {
      if (model_.running().size() < 7) start();
    } else if (op <= 5) {
      int64_t request = draw_running();
      extend(request, some_text(model_.running().at(request).tokens.size()));
    } else if (op <= 8) {
      std::vector<int32_t> ids = draw_tokens(input_, alphabet_, 1 + input_.below(3));
      for (int64_t request : running()) {
        if (input_.below(4) != 3) extend(request, ids);
      }
    } else if (op <= 14) {
      step();
    } else if (op == 15) {
      stop(draw_running());
    } else if (op == 16) {
      if (!model_.cached().empty()) evict(model_.cached()[input_.below(model_.cached().size())]);
    } else if (op == 17) {
      std::vector<int32_t> ids = some_text(0);
      if (!has_shared()) {
        refused("add without a shared tree", [&] { cache_->add(ids.data(), ids.size(), &kScope); });
        return;
      }
      int64_t request = cache_->add(ids.data(), ids.size(), &kScope);
      note("add " + text(ids) + " -> " + std::to_string(request));
      new_number(request);
      model_.add(request, ids);
    } else if (op == 18) {
      note("reclaim");
      require(cache_->reclaim() == model_.reclaim(), "reclaim returns what it gave back");
    } else if (op == 19 && input_.below(3) == 1) {
      save_and_load();
    } else if (op == 20) {
      wrong_calls();
    } else {
      int64_t request = draw_running();
      std::vector<int32_t> context = draw_tokens(input_, alphabet_, input_.below(4));
      std::vector<int32_t> more = some_text(0);
      context.insert(context.end(), more.begin(), more.end());
      DraftOptions options = draw_options(input_);
      DraftBuffer buffer(options.max_draft_tokens);
      cache_->speculate_after(request, context.data(), context.size(), options, buffer.draft);
      same_draft(
          buffer.result(),
          model_.speculate(request, context, options),
          "draft of " + std::to_string(request) + " after " + text(context) + ": " + text(options));
    }
  }

  std::vector<int64_t> running() const {
    std::vector<int64_t> numbers;
    for (const auto& [number, request] : model_.running()) numbers.push_back(number);
    return numbers;
  }
  int64_t draw_running() { return running()[input_.below(model_.running().size())]; }

  void new_number(int64_t request) {
    require(request >= 0 && numbers_.insert(request).second, "a number is given out again");
  }

  // Returns new tokens, or those that follow in another text after `size` tokens.
  std::vector<int32_t> some_text(size_t size) {
    std::vector<std::vector<int32_t>> texts;
    for (const auto& [number, request] : model_.running()) texts.push_back(request.tokens);
    for (const auto& sequence : model_.shared().sequences()) texts.push_back(sequence.tokens);
    std::erase_if(texts, [&](const auto& tokens) { return tokens.size() <= size; });
    if (texts.empty() || input_.below(2) == 0) {
      return draw_tokens(input_, alphabet_, input_.below(7));
    }
    const auto& tokens = texts[input_.below(texts.size())];
    size_t count = std::min<size_t>(tokens.size() - size, 1 + input_.below(12));
    return {tokens.begin() + size, tokens.begin() + size + count};
  }

  void start() {
    std::vector<int32_t> prompt = some_text(0);
    int64_t request = cache_->start(prompt.data(), prompt.size());
    note("start " + text(prompt) + " -> " + std::to_string(request));
    new_number(request);
    model_.start(request, prompt);
    if (input_.below(4) == 3) {  // queued behind the build of the prompt
      extend(request, draw_tokens(input_, alphabet_, input_.below(4)));
    }
    cache_->wait();
  }

  void extend(int64_t request, const std::vector<int32_t>& ids) {
    note("extend " + std::to_string(request) + " " + text(ids));
    cache_->extend(request, ids.data(), ids.size());
    model_.extend(request, ids);
  }

  void stop(int64_t request) {
    note("stop " + std::to_string(request));
    cache_->stop(request);
    model_.stop(request);
  }

  void evict(int64_t request) {
    note("evict " + std::to_string(request));
    cache_->evict(request);
    model_.evict(request);
  }

  void step() {
    constexpr int32_t kCanary = -77;
    int64_t capacity = input_.below(13), stride = capacity + 2, new_stride = 14;
    std::vector<int64_t> requests;
    std::vector<int32_t> limits, num_new, num_given;
    std::vector<std::vector<int32_t>> new_ids, given_ids;
    for (int64_t request : running()) {
      if (input_.below(5) == 4) continue;
      requests.insert(requests.begin() + input_.below(requests.size() + 1), request);
      if (input_.below(6) == 5) requests.push_back(-1);
    }
    int64_t batch = requests.size();
    std::vector<int32_t> new_buffer(batch * new_stride, kCanary);
    std::vector<int32_t> drafts((batch + 1) * stride, kCanary), parents(drafts);
    std::vector<float> probs(drafts.size(), -77.0f), scores(batch + 1, -77.0f);
    std::vector<int32_t> num_drafts(batch + 1, kCanary), match_lens(num_drafts);
    for (int64_t b = 0; b < batch; ++b) {
      bool is_idle = requests[b] < 0;
      new_ids.push_back(is_idle ? std::vector<int32_t>{}
                                : some_text(model_.running().at(requests[b]).tokens.size()));
      given_ids.push_back(draw_tokens(input_, alphabet_, input_.below(3) ? 0 : input_.below(4)));
      if (static_cast<int64_t>(given_ids[b].size()) > capacity) given_ids[b].resize(capacity);
      limits.push_back(input_.below(14));
      num_new.push_back(new_ids[b].size());
      num_given.push_back(given_ids[b].size());
      std::copy(new_ids[b].begin(), new_ids[b].end(), &new_buffer[b * new_stride]);
      std::copy(given_ids[b].begin(), given_ids[b].end(), &drafts[b * stride]);
    }
    DraftOptions options = draw_options(input_);
    bool has_all = input_.below(4) != 3;
    bool has_given = std::any_of(num_given.begin(), num_given.end(), [](int n) { return n > 0; });
    std::string what = "step";
    for (int64_t b = 0; b < batch; ++b) {
      what += "\n  " + std::to_string(requests[b]) + " " + text(new_ids[b]) +
              " limit=" + std::to_string(limits[b]) + " given=" + text(given_ids[b]);
    }
    note(what + "\n  capacity=" + std::to_string(capacity) + " " + text(options));
    cache_->step({.requests = requests.data(),
                  .new_token_ids = new_buffer.data(),
                  .num_new_tokens = num_new.data(),
                  .max_draft_tokens = limits.data(),
                  .num_given_drafts = has_given ? num_given.data() : nullptr,
                  .draft_token_ids = drafts.data(),
                  .num_draft_tokens = num_drafts.data(),
                  .parents = has_all ? parents.data() : nullptr,
                  .probs = has_all ? probs.data() : nullptr,
                  .scores = has_all ? scores.data() : nullptr,
                  .match_lens = has_all ? match_lens.data() : nullptr,
                  .batch = batch,
                  .new_stride = new_stride,
                  .draft_stride = stride,
                  .parents_stride = stride,
                  .probs_stride = stride,
                  .capacity = capacity,
                  .options = options});
    int64_t added = 0;
    for (int64_t b = 0; b < batch; ++b) {
      if (requests[b] >= 0) added += model_.append(requests[b], new_ids[b]);
    }
    model_.after_appends(added);
    for (int64_t b = 0; b < batch; ++b) {
      ModelDraft want;
      int32_t given = num_given[b];
      if (requests[b] >= 0) {
        std::vector<int32_t> context = model_.running().at(requests[b]).tokens;
        context.insert(context.end(), given_ids[b].begin(), given_ids[b].end());
        options.max_draft_tokens = std::min<int32_t>(limits[b], capacity - given);
        want = model_.speculate(requests[b], context, options);
      }
      want.token_ids.insert(want.token_ids.begin(), given_ids[b].begin(), given_ids[b].end());
      for (int32_t& parent : want.parents) parent += given;
      want.parents.insert(want.parents.begin(), given, kCanary);
      want.probs.insert(want.probs.begin(), given, -77.0f);
      want.token_ids.resize(capacity, -1);
      int32_t size = static_cast<int32_t>(want.probs.size()) - given;
      want.parents.resize(capacity, -2);
      want.probs.resize(capacity, 0.0f);
      for (int64_t i = capacity; i < stride; ++i) {
        want.token_ids.push_back(kCanary);
        want.parents.push_back(kCanary);
        want.probs.push_back(-77.0f);
      }
      if (!has_all) {
        want.parents.assign(stride, kCanary);
        want.probs.assign(stride, -77.0f);
        want.score = -77.0f;
        want.match_len = kCanary;
      }
      ModelDraft got{{&drafts[b * stride], &drafts[b * stride] + stride},
                     {&parents[b * stride], &parents[b * stride] + stride},
                     {&probs[b * stride], &probs[b * stride] + stride},
                     scores[b],
                     match_lens[b]};
      same_draft(got, want, "row " + std::to_string(b) + " of a step");
      require(num_drafts[b] == size, "num_draft_tokens of a step");
    }
    require(num_drafts[batch] == kCanary && match_lens[batch] == kCanary &&
                scores[batch] == -77.0f && drafts[batch * stride] == kCanary,
            "a step writes past its rows");
  }

  // These calls are refused and change nothing; later operations check that.
  template <typename Call>
  void refused(const char* what, Call call) {
    note(std::string("wrong: ") + what);
    try {
      call();
    } catch (const std::invalid_argument&) {
      return;
    }
    throw Failure(std::string(what) + " is not refused");
  }
  void wrong_calls() {
    int32_t id = 0;
    std::vector<int64_t> numbers = {int64_t{1} << 40, 977, -5};
    numbers.insert(numbers.end(), numbers_.begin(), numbers_.end());
    int64_t request = numbers[input_.below(numbers.size())];
    if (!model_.running().count(request)) {
      DraftBuffer buffer(4);
      DraftOptions options;
      options.max_draft_tokens = 4;
      refused("extend of what does not run", [&] { cache_->extend(request, &id, 1); });
      refused("stop of what does not run", [&] { cache_->stop(request); });
      refused("speculate for what does not run",
              [&] { cache_->speculate(request, options, buffer.draft); });
      int64_t requests[] = {draw_running(), request};
      int32_t num[] = {1, 1}, limits[] = {2, 2}, ids[] = {0, 0}, drafts[4], num_drafts[2];
      SuffixStepParams params{};
      params.requests = requests;
      params.new_token_ids = ids;
      params.num_new_tokens = num;
      params.max_draft_tokens = limits;
      params.draft_token_ids = drafts;
      params.num_draft_tokens = num_drafts;
      params.batch = 2;
      params.new_stride = 1;
      params.draft_stride = params.capacity = 2;
      if (request != -1) refused("a step of what does not run", [&] { cache_->step(params); });
      requests[1] = requests[0];
      refused("a request in two rows", [&] { cache_->step(params); });
    }
    if (!model_.is_cached(request)) {
      refused("evict of what is not cached", [&] { cache_->evict(request); });
    }
  }

  bool has_shared() const {
    return options_.max_cached_requests != 0 && options_.max_cached_tokens != 0;
  }

  void save_and_load() {
    if (!has_shared()) {
      refused("save without a shared tree", [&] { cache_->save(scratch_file()); });
      return;
    }
    note("save and load");
    cache_->save(scratch_file());
    if (input_.below(3) == 1) {  // into a cache with other budgets: the oldest are evicted
      options_.max_cached_requests = input_.pick({-1, 1, 2, 4});
      options_.max_cached_tokens = input_.pick({-1, 1, 10, 40});
      note("  now max_cached_requests=" + std::to_string(options_.max_cached_requests) +
           " max_cached_tokens=" + std::to_string(options_.max_cached_tokens));
    }
    auto loaded = std::make_unique<SuffixCache>(options_);
    loaded->load(scratch_file());
    unlink(scratch_file().c_str());
    std::vector<std::vector<int32_t>> responses;
    for (int64_t request : model_.cached()) responses.push_back(model_.response(request));
    auto num_tokens = [&] {
      size_t sum = 0;
      for (const auto& response : responses) sum += response.size();
      return static_cast<int64_t>(sum);
    };
    auto above = [](int64_t value, int64_t budget) { return budget >= 0 && value > budget; };
    while (above(static_cast<int64_t>(responses.size()), options_.max_cached_requests) ||
           above(num_tokens(), options_.max_cached_tokens)) {
      responses.erase(responses.begin());
    }
    std::vector<int64_t> numbers = loaded->cached();
    numbers_ = {numbers.begin(), numbers.end()};
    require(numbers.size() == responses.size(),
            "as many responses are loaded as there is room for");
    ModelCache model(options_);
    for (size_t i = 0; i < numbers.size(); ++i) model.add(numbers[i], responses[i]);
    model.reclaim();
    cache_ = std::move(loaded);
    model_ = model;
  }

  // Stops and evicts requests that have grown too long for brute force.
  void keep_small() {
    auto size = [&] {
      size_t sum = 0;
      for (const auto& [number, request] : model_.running()) sum += request.tokens.size();
      return sum;
    };
    while (size() > kMaxTokens) stop(model_.running().begin()->first);
    while (model_.shared().num_tokens() > static_cast<int64_t>(kMaxTokens)) {
      evict(model_.cached()[0]);
    }
  }

  void check() {
    std::string problem = cache_->check_integrity();
    require(problem.empty(), "check_integrity: " + problem);
    require(cache_->num_cached_tokens() == model_.shared().num_tokens(), "num_cached_tokens");
    require(cache_->num_cached_requests() == static_cast<int64_t>(model_.cached().size()),
            "num_cached_requests");
    require(cache_->cached() == model_.cached(),
            "the cached requests: " + text(cache_->cached()) + ", want " + text(model_.cached()));
    std::vector<int64_t> numbers = cache_->running();
    std::sort(numbers.begin(), numbers.end());
    require(numbers == running(), "the running requests");
    for (const auto& [number, request] : model_.running()) {
      require(cache_->is_running(number), "is_running");
      require(cache_->is_cached(number) == model_.is_cached(number), "is_cached");
      DraftOptions options = draw_options(input_);
      DraftBuffer buffer(options.max_draft_tokens);
      cache_->speculate(number, options, buffer.draft);
      same_draft(buffer.result(),
                 model_.speculate(number, request.tokens, options),
                 "draft of " + std::to_string(number) + ": " + text(options));
    }
  }

  void check_counts() {
    std::set<std::vector<int32_t>> windows;
    auto add = [&](const std::vector<int32_t>& tokens) {
      for (size_t i = 0; i < tokens.size(); ++i) {
        for (size_t j = i; j < tokens.size() && j <= i + std::min(options_.max_tree_depth, 12);
             ++j) {
          windows.insert({tokens.begin() + i, tokens.begin() + j + 1});
        }
      }
    };
    for (const auto& sequence : model_.shared().sequences()) add(sequence.tokens);
    for (const auto& [number, request] : model_.running()) add(request.tokens);
    for (const auto& window : windows) {
      auto want = [&](const ModelTree& tree) { return tree.count(window.data(), window.size()); };
      require(cache_->count(window.data(), window.size(), -1) == want(model_.shared()),
              "shared count of " + text(window));
      for (const auto& [number, request] : model_.running()) {
        require(cache_->count(window.data(), window.size(), number) == want(request.own),
                "own count of " + text(window) + " in " + std::to_string(number));
      }
    }
  }

  Input& input_;
  int32_t alphabet_;
  SuffixCacheOptions options_;
  std::unique_ptr<SuffixCache> cache_;
  ModelCache model_;
  std::set<int64_t> numbers_;
};

// ---- the file ----

std::string read_whole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Changes some bytes in the file of a small cache. Either the checksums stay as they were and
// detect the change, or the sections get valid checksums. The latter never happens by accident;
// `load` may accept such a file, but must not crash.
class FileRun {
 public:
  explicit FileRun(Input& input) : input_(input) {}

  void run() {
    SuffixCacheOptions options;
    options.max_tree_depth = input_.pick(kDepths);
    bool has_new_checksums = input_.below(2) == 1;
    SuffixCache cache(options);
    for (uint32_t i = 0, size = input_.below(5); i < size; ++i) {
      std::vector<int32_t> ids = draw_tokens(input_, 3, input_.below(40));
      cache.add(ids.data(), ids.size(), &kScope);
    }
    if (input_.below(3) == 1 && !cache.cached().empty()) cache.evict(cache.cached()[0]);
    cache.save(scratch_file());
    std::string before = read_whole(scratch_file());
    if (input_.below(16) == 15) every_byte(options, before);
    if (has_new_checksums) {
      damage_sections();
    } else {
      std::string bytes = before;
      damage(bytes);
      std::ofstream(scratch_file(), std::ios::binary) << bytes;
    }
    bool is_damaged = read_whole(scratch_file()) != before;
    SuffixCache loaded(options);
    bool is_loaded = false;
    try {
      loaded.load(scratch_file());
      is_loaded = true;
    } catch (const std::runtime_error&) {
    }
    unlink(scratch_file().c_str());
    require(is_loaded || is_damaged, "a file as it was written is refused");
    require(!is_loaded || !is_damaged || has_new_checksums, "a damaged file is loaded");
    if (!is_loaded) {
      require(loaded.num_cached_requests() == 0, "a refused file leaves requests behind");
      require(loaded.num_cached_tokens() == 0, "a refused file leaves tokens behind");
    }
    if (!is_loaded || !is_damaged) use(loaded);
  }

 private:
  static bool loads(const SuffixCacheOptions& options, const std::string& bytes) {
    std::ofstream(scratch_file(), std::ios::binary) << bytes;
    SuffixCache cache(options);
    try {
      cache.load(scratch_file());
      return true;
    } catch (const std::runtime_error&) {
      return false;
    }
  }

  void every_byte(const SuffixCacheOptions& options, std::string bytes) {
    note("a bit of every byte of a file, and every beginning of it");
    for (size_t place = 0; place < bytes.size(); ++place) {
      char byte = bytes[place];
      bytes[place] = static_cast<char>(byte ^ (1 << place % 8));
      require(!loads(options, bytes), "a changed byte is not noticed: " + std::to_string(place));
      bytes[place] = byte;
      require(!loads(options, bytes.substr(0, place)), "a file that is cut short is loaded");
    }
    require(loads(options, bytes), "a file as it was written is refused");
  }

  void damage(std::string& bytes) {
    for (uint32_t i = 0, size = 1 + input_.below(3); i < size && !bytes.empty(); ++i) {
      size_t place =
          (input_.below(256) << 16 | input_.below(256) << 8 | input_.below(256)) % bytes.size();
      switch (input_.below(6)) {
        case 0:
          bytes.resize(place);
          break;
        case 1:
          bytes.insert(place, 1 + input_.below(40), static_cast<char>(input_.below(256)));
          break;
        case 2:
          bytes.erase(place, 1 + input_.below(40));
          break;
        case 3: {  // a number of 4 bytes, large or small
          int32_t value = input_.pick({-1, 0, 1, 2, 1 << 20, 1 << 30, -(1 << 30), 0x7fffffff});
          place -= place % 4;
          if (place + 4 <= bytes.size()) std::memcpy(&bytes[place], &value, 4);
          break;
        }
        default:
          bytes[place] = static_cast<char>(bytes[place] ^ (1 << input_.below(8)));
      }
    }
  }

  void damage_sections() {
    std::vector<std::string> sections;
    try {
      FileReader file(scratch_file());
      for (;;) {
        sections.emplace_back(file.section_bytes(), 0);
        file.section(sections.back().data(), sections.back().size());
      }
    } catch (const std::runtime_error&) {  // there is no further section
    }
    if (sections.empty()) return;
    size_t place = input_.below(sections.size());
    if (input_.below(8) == 7) {
      std::swap(sections[place], sections[input_.below(sections.size())]);
    } else {
      damage(sections[place]);
    }
    FileWriter file(scratch_file());
    for (const std::string& section : sections) file.section(section.data(), section.size());
    file.finish();
  }

  // After a refusal the cache works like a new one.
  void use(SuffixCache& cache) {
    std::string problem = cache.check_integrity();
    require(problem.empty(), "check_integrity after a file: " + problem);
    std::vector<int32_t> ids = {0, 1, 2, 0, 1};
    int64_t request = cache.start(ids.data(), ids.size());
    cache.wait();
    for (int32_t i = 0; i < 20; ++i) {
      int32_t id = i % 3;
      cache.extend(request, &id, 1);
      DraftOptions options;
      options.max_draft_tokens = 8;
      options.use_tree = i % 2 == 1;
      DraftBuffer buffer(8);
      cache.speculate(request, options, buffer.draft);
      buffer.result();
    }
    cache.stop(request);
    while (!cache.cached().empty()) cache.evict(cache.cached()[0]);
    cache.reclaim();
    require(cache.check_integrity().empty(), "check_integrity after a file");
  }

  Input& input_;
};

}  // namespace

void run_input(const uint8_t* data, size_t size) {
  journal.clear();
  Input input(data, size);
  uint32_t kind = input.below(40);
  if (kind < 20) {
    TreeRun(input).run();
  } else if (kind < 34) {
    CacheRun(input).run();
  } else if (kind < 39) {
    FileRun(input).run();
  } else {
    LargeRun(input).run();
  }
}

}  // namespace specops

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    specops::run_input(data, size);
  } catch (const std::exception& error) {
    std::printf("after\n%s%s\n", specops::journal.c_str(), error.what());
    std::abort();
  }
  return 0;
}

#ifndef SPECOPS_LIBFUZZER

namespace {

using Bytes = std::vector<uint8_t>;

// Returns input number i of a seed. Every sixteenth input is new; the next fifteen are mutations of
// it.
Bytes make_input(uint64_t seed, uint64_t number) {
  std::mt19937_64 fresh(seed * 1000003 + number / 16);
  Bytes bytes(fresh() % (fresh() % 4 == 0 ? 1500 : 300) + 1);
  // Mutations prefer small values: the decoder takes remainders, so these select the usual choices.
  uint64_t limit = fresh() % 2 == 0 ? 256 : 40;
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(fresh() % limit);
  std::mt19937_64 random(seed * 7919 + number);
  for (uint64_t i = 0; number % 16 != 0 && i < 1 + random() % 4; ++i) {
    size_t place = random() % bytes.size(), size = 1 + random() % 24;
    auto begin = bytes.begin() + place, end = begin + std::min(size, bytes.size() - place);
    Bytes piece(begin, end);
    switch (random() % 4) {
      case 0:
        bytes[place] = static_cast<uint8_t>(random());
        break;
      case 1:
        bytes[place] = static_cast<uint8_t>(bytes[place] + 1);
        break;
      case 2:
        bytes.insert(bytes.begin() + random() % bytes.size(), piece.begin(), piece.end());
        break;
      default:
        if (piece.size() < bytes.size()) bytes.erase(begin, end);
    }
  }
  return bytes;
}

std::string failure_of(const Bytes& bytes) {
  try {
    specops::run_input(bytes.data(), bytes.size());
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// Removes bytes, then lowers them, as long as a failure remains.
Bytes shrink(Bytes bytes) {
  for (bool progress = true; progress;) {
    progress = false;
    for (size_t size = std::max<size_t>(bytes.size() / 2, 1); size > 0; size /= 2) {
      for (size_t i = 0; i + size <= bytes.size();) {
        Bytes shorter = bytes;
        shorter.erase(shorter.begin() + i, shorter.begin() + i + size);
        if (failure_of(shorter).empty()) {
          i += size;
        } else {
          bytes = shorter;
          progress = true;
        }
      }
    }
    for (size_t i = 0; i < bytes.size(); ++i) {
      for (uint8_t value : {0, bytes[i] / 2, bytes[i] - 1}) {
        Bytes lower = bytes;
        lower[i] = value;
        if (value < bytes[i] && !failure_of(lower).empty()) {
          bytes = lower;
          progress = true;
        }
      }
    }
  }
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  double seconds = argc > 1 ? std::atof(argv[1]) : 10;
  uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device()();
  uint64_t first = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 0, number = first;
  std::printf("fuzz_suffix_tree: %g seconds, seed %llu\n", seconds, (unsigned long long)seed);
  std::fflush(stdout);
  auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (; std::chrono::steady_clock::now() < end; ++number) {
    Bytes bytes = make_input(seed, number);
    if (failure_of(bytes).empty()) continue;
    bytes = shrink(bytes);
    std::string failure = failure_of(bytes);
    std::printf("seed %llu, input %llu, after\n%s%s\n",
                (unsigned long long)seed,
                (unsigned long long)number,
                specops::journal.c_str(),
                failure.c_str());
    return 1;
  }
  std::printf("%llu inputs, nothing wrong\n", (unsigned long long)(number - first));
  return 0;
}

#endif
