// SPDX-License-Identifier: Apache-2.0
// Requests stand in slots; a linked list through them is the order in which those that are cached were
// started. One mutex guards everything but the trees that the builder thread is at work on.
#include "suffix_tree/suffix_cache.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "common/parallel.h"
#include "suffix_tree/suffix_file.h"

namespace specops {
namespace {

constexpr int32_t kNoSlot = -1;
constexpr int32_t kNoSequence = -1;
// For each token appended so many of those taken out are given back: more than one, so that what
// waits gets less.
constexpr int64_t kReclaimPerToken = 2;
// Trees of ended requests are kept for later ones, so many and not larger than this.
constexpr size_t kMaxIdleTrees = 256;
constexpr int64_t kMaxIdleTreeBytes = int64_t{1} << 18;
// The builder looks so often whether its request has stopped.
constexpr int64_t kBuildTokens = 4096;
// Rows of a batch that one thread takes at a time.
constexpr int64_t kRowsAtOnce = 4;

// The last tokens of a text, up to `depth`, in one piece.
class Tail {
 public:
  void clear() { tokens_.clear(); }

  void append(const int32_t* token_ids, int64_t size, int64_t depth) {
    int64_t kept = static_cast<int64_t>(tokens_.size());
    if (size >= depth) {
      tokens_.assign(token_ids + size - depth, token_ids + size);
      return;
    }
    if (kept + size > 2 * depth) {
      int64_t last = depth - size;
      std::memmove(tokens_.data(), tokens_.data() + kept - last, last * sizeof(int32_t));
      tokens_.resize(last);
    }
    tokens_.insert(tokens_.end(), token_ids, token_ids + size);
  }

  int64_t size(int64_t depth) const {
    return std::min(static_cast<int64_t>(tokens_.size()), depth);
  }
  const int32_t* data(int64_t depth) const {
    return tokens_.data() + tokens_.size() - static_cast<size_t>(size(depth));
  }

 private:
  std::vector<int32_t> tokens_;  // at most 2 * depth
};

// The tree of a request's own text: one sequence.
struct OwnTree {
  explicit OwnTree(int32_t max_depth) : tree(max_depth) {}
  SuffixTree tree;
  int32_t sequence = kNoSequence;
};

// A prompt that the builder thread puts into a tree. `queued`, `done` and `cancelled` are the
// cache's; the rest is the builder's until it is done.
struct Build {
  std::unique_ptr<OwnTree> own;
  std::vector<int32_t> prompt;
  std::vector<int32_t> queued;  // written since
  int32_t slot = kNoSlot;
  std::atomic<bool> cancelled{false};
};

struct Request {
  int64_t number = -1;  // -1: the slot is free
  int64_t generation = 0;
  int64_t step = 0;  // the last step that it was part of
  bool running = false;
  int32_t shared = kNoSequence;                // in the shared tree
  int32_t older = kNoSlot, younger = kNoSlot;  // of those in the shared tree
  int32_t earlier = kNoSlot, later = kNoSlot;  // of those running
  std::unique_ptr<OwnTree> own;                // of a running request; nullptr while it is built
  std::shared_ptr<Build> build;
  Tail tail;  // of prompt and response; of a running request
};

// A doubly linked list through the slots.
template <int32_t Request::* kBefore, int32_t Request::* kAfter>
struct Chain {
  int32_t first = kNoSlot, last = kNoSlot;
  int64_t size = 0;

  void push(std::vector<Request>& slots, int32_t slot) {
    slots[slot].*kBefore = last;
    slots[slot].*kAfter = kNoSlot;
    (last == kNoSlot ? first : slots[last].*kAfter) = slot;
    last = slot;
    ++size;
  }

  void remove(std::vector<Request>& slots, int32_t slot) {
    int32_t before = slots[slot].*kBefore;
    int32_t after = slots[slot].*kAfter;
    (before == kNoSlot ? first : slots[before].*kAfter) = after;
    (after == kNoSlot ? last : slots[after].*kBefore) = before;
    --size;
  }

  std::vector<int64_t> numbers(const std::vector<Request>& slots) const {
    std::vector<int64_t> out;
    for (int32_t slot = first; slot != kNoSlot; slot = slots[slot].*kAfter) {
      out.push_back(slots[slot].number);
    }
    return out;
  }
};

// Where the shared tree drafts: its draft is taken only if it is better.
struct Scratch {
  std::vector<int32_t> token_ids, parents, context;
  std::vector<float> probs;

  SuffixDraft draft(int32_t room, const SuffixDraft& like) {
    if (static_cast<size_t>(room) > token_ids.size()) {
      token_ids.resize(room);
      parents.resize(room);
      probs.resize(room);
    }
    return {.token_ids = token_ids.data(),
            .parents = like.parents ? parents.data() : nullptr,
            .probs = like.probs ? probs.data() : nullptr};
  }
};

Scratch& scratch() {
  thread_local Scratch instance;
  return instance;
}

void copy_draft(const SuffixDraft& from, SuffixDraft& to) {
  size_t size = from.size;
  std::memcpy(to.token_ids, from.token_ids, size * sizeof(int32_t));
  if (to.parents) std::memcpy(to.parents, from.parents, size * sizeof(int32_t));
  if (to.probs) std::memcpy(to.probs, from.probs, size * sizeof(float));
  to.size = from.size;
  to.score = from.score;
  to.match_len = from.match_len;
}

std::unique_ptr<SuffixTree> make_shared_tree(const SuffixCacheOptions& options) {
  bool off = options.max_cached_requests == 0 || options.max_cached_tokens == 0 ||
             options.max_cached_bytes == 0;
  return off ? nullptr : std::make_unique<SuffixTree>(options.max_tree_depth);
}

// A file: the label, this head, the requests' handles, the tree.
struct FileHead {
  int64_t max_depth;
  int64_t num_requests;
};

std::string next_text(FileReader& file) {
  std::string text(file.section_bytes(), '\0');
  file.section(text.data(), text.size());
  return text;
}

}  // namespace

struct SuffixCache::State {
  explicit State(const SuffixCacheOptions& given)
      : options(given), depth(given.max_tree_depth), shared(make_shared_tree(given)) {}

  ~State() {
    if (!builder.joinable()) return;
    if (!has_builder()) {  // a forked child has the object, not the thread
      builder.detach();
      return;
    }
    {
      std::lock_guard<std::mutex> guard(mutex);
      stopping = true;
      for (const std::shared_ptr<Build>& build : builds) build->cancelled = true;
      if (current) current->cancelled = true;
    }
    wake.notify_all();
    builder.join();
  }

  // ---- slots ----

  Request* find(int64_t number) {
    int64_t slot = SuffixCache::slot(number);
    if (number < 0 || slot >= static_cast<int64_t>(slots.size())) return nullptr;
    Request& request = slots[slot];
    return request.number == number ? &request : nullptr;
  }

  Request& running_request(int64_t number) {
    Request* request = find(number);
    if (request == nullptr || !request->running) {
      throw std::invalid_argument("request must be the number of a running one, got " +
                                  std::to_string(number));
    }
    return *request;
  }

  int32_t slot_of(const Request& request) const {
    return static_cast<int32_t>(SuffixCache::slot(request.number));
  }

  Request& take_slot() {
    if (free_slots.empty()) {
      free_slots.push_back(static_cast<int32_t>(slots.size()));
      slots.emplace_back();
    }
    int32_t slot = free_slots.back();
    free_slots.pop_back();
    Request& request = slots[slot];
    request.number = (request.generation++ << 32) | slot;
    return request;
  }

  void free_if_unused(Request& request) {
    if (request.running || request.shared != kNoSequence) return;
    free_slots.push_back(slot_of(request));
    request.number = -1;
  }

  // ---- the shared tree ----

  void evict(Request& request) {
    shared->remove(request.shared);
    request.shared = kNoSequence;
    cached.remove(slots, slot_of(request));
    free_if_unused(request);
  }

  bool over_budget() const {
    if (options.max_cached_tokens >= 0 && shared->num_tokens() > options.max_cached_tokens) {
      return true;
    }
    if (options.max_cached_bytes < 0) return false;
    // What is taken out still holds its share until it is given back.
    auto used = static_cast<double>(shared->num_used_bytes());
    auto tokens = static_cast<double>(shared->num_tokens());
    double all = tokens + static_cast<double>(shared->num_pending_tokens());
    return all > 0 && used * (tokens / all) > static_cast<double>(options.max_cached_bytes);
  }

  // After so many tokens were appended.
  void keep_within_budgets(int64_t appended) {
    while (cached.first != kNoSlot && over_budget()) evict(slots[cached.first]);
    if (shared->num_pending_tokens() > 0) shared->reclaim(kReclaimPerToken * appended);
  }

  void begin_shared(Request& request) {
    while (options.max_cached_requests >= 0 && cached.size >= options.max_cached_requests) {
      evict(slots[cached.first]);
    }
    request.shared = shared->start();
    cached.push(slots, slot_of(request));
  }

  // ---- own trees ----

  std::unique_ptr<OwnTree> take_tree() {
    std::unique_ptr<OwnTree> own;
    if (idle_trees.empty()) {
      own = std::make_unique<OwnTree>(options.max_tree_depth);
    } else {
      own = std::move(idle_trees.back());
      idle_trees.pop_back();
    }
    own->sequence = own->tree.start();
    return own;
  }

  void retire(std::unique_ptr<OwnTree> own) {
    if (own->tree.num_bytes() <= kMaxIdleTreeBytes && idle_trees.size() < kMaxIdleTrees) {
      own->tree.clear();
      idle_trees.push_back(std::move(own));
    } else if (has_builder()) {
      retired.push_back(std::move(own));  // giving back a large tree takes a while
      wake.notify_one();
    }
  }

  void append_own(Request& request, const int32_t* token_ids, int64_t size) {
    if (request.own) {
      request.own->tree.append(request.own->sequence, token_ids, size);
    } else {
      request.build->queued.insert(request.build->queued.end(), token_ids, token_ids + size);
    }
    request.tail.append(token_ids, size, depth);
  }

  // ---- the builder ----

  bool has_builder() const { return builder.joinable() && builder_pid == ::getpid(); }

  void build_in_background(Request& request, const int32_t* prompt, int64_t size) {
    auto build = std::make_shared<Build>();
    build->prompt.assign(prompt, prompt + size);
    build->slot = slot_of(request);
    request.build = build;
    builds.push_back(std::move(build));
    if (!has_builder()) {
      if (builder.joinable()) builder.detach();
      builder_pid = ::getpid();
      builder = std::thread([this] { run_builder(); });
    }
    wake.notify_one();
  }

  void run_builder() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      wake.wait(lock, [&] { return stopping || !builds.empty() || !retired.empty(); });
      if (stopping) return;
      if (builds.empty()) {
        std::vector<std::unique_ptr<OwnTree>> old = std::move(retired);
        retired.clear();
        lock.unlock();
        old.clear();
        lock.lock();
        continue;
      }
      current = std::move(builds.front());
      builds.pop_front();
      build_current(lock);
      current.reset();
      built.notify_all();
    }
  }

  void build_current(std::unique_lock<std::mutex>& lock) {
    Build& build = *current;
    if (build.cancelled) return;
    build.own = take_tree();
    std::vector<int32_t> tokens = std::move(build.prompt);
    while (!tokens.empty() && !build.cancelled) {
      lock.unlock();
      auto size = static_cast<int64_t>(tokens.size());
      for (int64_t at = 0; at < size && !build.cancelled; at += kBuildTokens) {
        build.own->tree.append(
            build.own->sequence, tokens.data() + at, std::min(kBuildTokens, size - at));
      }
      lock.lock();
      tokens.clear();
      std::swap(tokens, build.queued);
    }
    if (build.cancelled) {
      retire(std::move(build.own));
      return;
    }
    Request& request = slots[build.slot];
    request.own = std::move(build.own);
    request.build.reset();
  }

  void wait_for(std::unique_lock<std::mutex>& lock, int64_t number) {
    built.wait(lock, [&] {
      Request* request = find(number);
      return request == nullptr || request->build == nullptr;
    });
  }

  // ---- drafts ----

  void draft_own(const Request& request,
                 int32_t sequence,
                 const int32_t* context,
                 int64_t size,
                 const DraftOptions& draft_options,
                 SuffixDraft& draft) const {
    draft.size = 0;
    draft.score = 0.0f;
    draft.match_len = 0;
    if (request.own) request.own->tree.speculate(sequence, context, size, draft_options, draft);
  }

  // Replaces the draft where the shared tree has a better one.
  void draft_shared(int32_t sequence,
                    const int32_t* context,
                    int64_t size,
                    DraftOptions draft_options,
                    SuffixDraft& draft) const {
    if (shared == nullptr) return;
    draft_options.above_score = draft.score;
    SuffixDraft better = scratch().draft(draft_options.max_draft_tokens, draft);
    shared->speculate(sequence, context, size, draft_options, better);
    if (better.size > 0) copy_draft(better, draft);
  }

  // ---- one step of a batch ----

  struct Row {
    Request* request = nullptr;
    int32_t given = 0;
    int32_t room = 0;
    SuffixDraft draft;
  };

  void find_rows(const SuffixStepParams& params) {
    ++steps;
    rows.assign(params.batch, Row());
    for (int64_t b = 0; b < params.batch; ++b) {
      if (params.requests[b] == -1) continue;
      Request* request = find(params.requests[b]);
      if (request == nullptr || !request->running || request->step == steps) {
        throw std::invalid_argument(
            "requests[" + std::to_string(b) + "] must be -1 or the number of a running request" +
            (request != nullptr && request->running ? " that no other row has" : "") + ", got " +
            std::to_string(params.requests[b]));
      }
      request->step = steps;
      rows[b].request = request;
    }
  }

  void append_shared(const SuffixStepParams& params) {
    if (shared == nullptr) return;
    // Of the shared tree little is in a cache since the last step; the own ones are small.
    for (int32_t pass = 0; pass < 3; ++pass) {
      for (int64_t b = 0; b < params.batch; ++b) {
        const Request* request = rows[b].request;
        if (request == nullptr || request->shared == kNoSequence) continue;
        if (params.num_new_tokens[b] == 0) continue;
        shared->prefetch(request->shared, params.new_token_ids[b * params.new_stride], pass);
      }
    }
    int64_t appended = 0;
    for (int64_t b = 0; b < params.batch; ++b) {
      const Request* request = rows[b].request;
      if (request == nullptr || request->shared == kNoSequence) continue;
      int32_t size = params.num_new_tokens[b];
      shared->append(request->shared, params.new_token_ids + b * params.new_stride, size);
      appended += size;
    }
    keep_within_budgets(appended);
  }

  // What the match of a row ends with: its own text, or the drafts it was given.
  const int32_t* row_context(const SuffixStepParams& params, int64_t b, int64_t& size) const {
    const Row& row = rows[b];
    size = row.request->tail.size(depth);
    const int32_t* tail = row.request->tail.data(depth);
    if (row.given == 0) return tail;
    std::vector<int32_t>& context = scratch().context;
    context.assign(tail, tail + size);
    const int32_t* given = params.draft_token_ids + b * params.draft_stride;
    context.insert(context.end(), given, given + row.given);
    size = std::min(size + row.given, depth);
    return context.data() + context.size() - size;
  }

  void draft_row_own(const SuffixStepParams& params, int64_t b) {
    Row& row = rows[b];
    row.given = params.num_given_drafts ? params.num_given_drafts[b] : 0;
    if (row.request == nullptr) return;
    append_own(
        *row.request, params.new_token_ids + b * params.new_stride, params.num_new_tokens[b]);
    row.room = static_cast<int32_t>(
        std::min<int64_t>(params.max_draft_tokens[b], params.capacity - row.given));
    if (row.room == 0) return;
    row.draft.token_ids = params.draft_token_ids + b * params.draft_stride + row.given;
    if (params.parents) row.draft.parents = params.parents + b * params.parents_stride + row.given;
    if (params.probs) row.draft.probs = params.probs + b * params.probs_stride + row.given;
    DraftOptions draft_options = params.options;
    draft_options.max_draft_tokens = row.room;
    int64_t size = 0;
    const int32_t* context = row_context(params, b, size);
    int32_t sequence =
        row.given == 0 && row.request->own ? row.request->own->sequence : kNoSequence;
    draft_own(*row.request, sequence, context, size, draft_options, row.draft);
  }

  void draft_row_shared(const SuffixStepParams& params, int64_t b) {
    Row& row = rows[b];
    if (row.room > 0) {
      DraftOptions draft_options = params.options;
      draft_options.max_draft_tokens = row.room;
      int64_t size = 0;
      const int32_t* context = row_context(params, b, size);
      int32_t sequence = row.given == 0 ? row.request->shared : kNoSequence;
      draft_shared(sequence, context, size, draft_options, row.draft);
    }
    const SuffixDraft& draft = row.draft;
    int64_t end = row.given + draft.size;
    std::fill(params.draft_token_ids + b * params.draft_stride + end,
              params.draft_token_ids + b * params.draft_stride + params.capacity,
              -1);
    if (params.parents) {
      int32_t* parents = params.parents + b * params.parents_stride;
      for (int64_t i = row.given; i < end; ++i) parents[i] += row.given;
      std::fill(parents + end, parents + params.capacity, -2);
    }
    if (params.probs) {
      float* probs = params.probs + b * params.probs_stride;
      std::fill(probs + end, probs + params.capacity, 0.0f);
    }
    params.num_draft_tokens[b] = draft.size;
    if (params.scores) params.scores[b] = draft.score;
    if (params.match_lens) params.match_lens[b] = draft.match_len;
  }

  void step(const SuffixStepParams& params) {
    find_rows(params);
    // One writer of the shared tree; beside it the own trees, each of them one row's alone.
    int64_t pieces = (params.batch + kRowsAtOnce - 1) / kRowsAtOnce;
    parallel_for(pieces + 1, 1, [&](int64_t begin, int64_t end) {
      for (int64_t piece = begin; piece < end; ++piece) {
        if (piece == 0) {
          append_shared(params);
          continue;
        }
        int64_t last = std::min(piece * kRowsAtOnce, params.batch);
        for (int64_t b = (piece - 1) * kRowsAtOnce; b < last; ++b) draft_row_own(params, b);
      }
    });
    parallel_for(params.batch, kRowsAtOnce, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) draft_row_shared(params, b);
    });
  }

  // ---- checks ----

  std::string check() const {
    if (shared) {
      std::string wrong = shared->check_integrity();
      if (!wrong.empty()) return "the shared tree: " + wrong;
      int64_t tokens = 0;
      int64_t count = 0;
      for (int32_t slot = cached.first; slot != kNoSlot; slot = slots[slot].younger) {
        if (slots[slot].shared == kNoSequence) return "a cached request has no sequence";
        tokens += shared->length(slots[slot].shared);
        ++count;
      }
      if (count != cached.size || count != shared->num_sequences()) {
        return "the shared tree and the list of requests differ in number";
      }
      if (tokens != shared->num_tokens()) return "the shared tree's tokens are not the requests'";
    }
    int64_t num_running = 0;
    int64_t num_cached = 0;
    int64_t num_free = 0;
    for (const Request& request : slots) {
      num_running += request.running;
      num_cached += request.shared != kNoSequence;
      num_free += request.number < 0;
      if (request.running == (request.number < 0 || !(request.own || request.build))) {
        return "a request has no tree of its own, or one too many";
      }
      if (request.running && request.own) {
        std::string wrong = request.own->tree.check_integrity();
        if (!wrong.empty()) return "a request's own tree: " + wrong;
      }
    }
    if (num_running != running.size || num_cached != cached.size ||
        num_free != static_cast<int64_t>(free_slots.size())) {
      return "the lists of requests do not fit the requests";
    }
    return "";
  }

  const SuffixCacheOptions options;
  const int64_t depth;
  std::mutex mutex;
  std::unique_ptr<SuffixTree> shared;  // nullptr: off
  std::vector<Request> slots;
  std::vector<int32_t> free_slots;
  Chain<&Request::older, &Request::younger> cached;
  Chain<&Request::earlier, &Request::later> running;
  std::vector<std::unique_ptr<OwnTree>> idle_trees;
  std::vector<Row> rows;
  int64_t steps = 0;

  std::thread builder;  // from the first long prompt on
  ::pid_t builder_pid = 0;
  std::condition_variable wake, built;
  std::deque<std::shared_ptr<Build>> builds;  // in the order they came
  std::shared_ptr<Build> current;
  std::vector<std::unique_ptr<OwnTree>> retired;
  bool stopping = false;
};

SuffixCache::SuffixCache(const SuffixCacheOptions& options)
    : state_(std::make_unique<State>(options)) {}

SuffixCache::~SuffixCache() = default;

int64_t SuffixCache::start(const int32_t* prompt, int64_t size) {
  State& state = *state_;
  std::lock_guard<std::mutex> guard(state.mutex);
  Request& request = state.take_slot();
  request.running = true;
  state.running.push(state.slots, state.slot_of(request));
  request.tail.clear();
  request.tail.append(prompt, size, state.depth);
  if (state.shared) state.begin_shared(request);
  if (state.options.background_tokens >= 0 && size >= state.options.background_tokens) {
    state.build_in_background(request, prompt, size);
  } else {
    request.own = state.take_tree();
    request.own->tree.append(request.own->sequence, prompt, size);
  }
  return request.number;
}

void SuffixCache::extend(int64_t number, const int32_t* token_ids, int64_t size) {
  State& state = *state_;
  std::lock_guard<std::mutex> guard(state.mutex);
  Request& request = state.running_request(number);
  state.append_own(request, token_ids, size);
  if (request.shared == kNoSequence) return;
  state.shared->append(request.shared, token_ids, size);
  state.keep_within_budgets(size);
}

void SuffixCache::speculate(int64_t number, const DraftOptions& options, SuffixDraft& draft) {
  State& state = *state_;
  std::lock_guard<std::mutex> guard(state.mutex);
  Request& request = state.running_request(number);
  const int32_t* context = request.tail.data(state.depth);
  int64_t size = request.tail.size(state.depth);
  int32_t own = request.own ? request.own->sequence : kNoSequence;
  state.draft_own(request, own, context, size, options, draft);
  state.draft_shared(request.shared, context, size, options, draft);
}

void SuffixCache::speculate_after(int64_t number,
                                  const int32_t* context,
                                  int64_t size,
                                  const DraftOptions& options,
                                  SuffixDraft& draft) {
  State& state = *state_;
  std::lock_guard<std::mutex> guard(state.mutex);
  Request& request = state.running_request(number);
  int64_t used = std::min(size, state.depth);
  context += size - used;
  // Callers mostly hand over the request's own text: then its place in the trees is known.
  int64_t tail_size = request.tail.size(state.depth);
  bool its_own =
      used <= tail_size &&
      std::equal(context, context + used, request.tail.data(state.depth) + (tail_size - used));
  int32_t own = its_own && request.own ? request.own->sequence : kNoSequence;
  int32_t shared = its_own ? request.shared : kNoSequence;
  state.draft_own(request, own, context, used, options, draft);
  state.draft_shared(shared, context, used, options, draft);
}

void SuffixCache::step(const SuffixStepParams& params) {
  std::lock_guard<std::mutex> guard(state_->mutex);
  state_->step(params);
}

void SuffixCache::stop(int64_t number) {
  State& state = *state_;
  std::lock_guard<std::mutex> guard(state.mutex);
  Request& request = state.running_request(number);
  request.running = false;
  state.running.remove(state.slots, state.slot_of(request));
  if (request.shared != kNoSequence) state.shared->finish(request.shared);
  if (request.own) state.retire(std::move(request.own));
  if (request.build) {
    request.build->cancelled = true;
    request.build.reset();
    state.built.notify_all();
  }
  state.free_if_unused(request);
}

void SuffixCache::evict(int64_t number) {
  State& state = *state_;
  std::lock_guard<std::mutex> guard(state.mutex);
  Request* request = state.find(number);
  if (request == nullptr || request->shared == kNoSequence) {
    throw std::invalid_argument("request must be the number of a cached one, got " +
                                std::to_string(number));
  }
  state.evict(*request);
}

int64_t SuffixCache::add(const int32_t* token_ids, int64_t size) {
  State& state = *state_;
  std::lock_guard<std::mutex> guard(state.mutex);
  if (state.shared == nullptr) {
    throw std::invalid_argument("a budget is 0, so that there is no shared tree to add to");
  }
  Request& request = state.take_slot();
  int64_t number = request.number;
  state.begin_shared(request);
  state.shared->append(request.shared, token_ids, size);
  state.shared->finish(request.shared);
  state.keep_within_budgets(size);
  return number;
}

int64_t SuffixCache::reclaim() {
  std::lock_guard<std::mutex> guard(state_->mutex);
  return state_->shared ? state_->shared->reclaim(state_->shared->num_pending_tokens()) : 0;
}

void SuffixCache::wait() {
  State& state = *state_;
  std::unique_lock<std::mutex> lock(state.mutex);
  state.built.wait(lock, [&] { return state.builds.empty() && state.current == nullptr; });
}

bool SuffixCache::is_running(int64_t number) const {
  std::lock_guard<std::mutex> guard(state_->mutex);
  Request* request = state_->find(number);
  return request != nullptr && request->running;
}

bool SuffixCache::is_cached(int64_t number) const {
  std::lock_guard<std::mutex> guard(state_->mutex);
  Request* request = state_->find(number);
  return request != nullptr && request->shared != kNoSequence;
}

std::vector<int64_t> SuffixCache::running() const {
  std::lock_guard<std::mutex> guard(state_->mutex);
  return state_->running.numbers(state_->slots);
}

std::vector<int64_t> SuffixCache::cached() const {
  std::lock_guard<std::mutex> guard(state_->mutex);
  return state_->cached.numbers(state_->slots);
}

bool SuffixCache::is_busy() const {
  if (!state_->mutex.try_lock()) return true;
  state_->mutex.unlock();
  return false;
}

bool SuffixCache::is_building(int64_t number) const {
  std::lock_guard<std::mutex> guard(state_->mutex);
  Request* request = state_->find(number);
  return request != nullptr && request->build != nullptr;
}

int64_t SuffixCache::count(const int32_t* token_ids, int64_t size, int64_t number) const {
  State& state = *state_;
  std::unique_lock<std::mutex> lock(state.mutex);
  if (number == -1) return state.shared ? state.shared->count(token_ids, size) : 0;
  state.running_request(number);
  state.wait_for(lock, number);
  return state.running_request(number).own->tree.count(token_ids, size);
}

int64_t SuffixCache::num_cached_requests() const {
  std::lock_guard<std::mutex> guard(state_->mutex);
  return state_->cached.size;
}

int64_t SuffixCache::num_cached_tokens() const {
  std::lock_guard<std::mutex> guard(state_->mutex);
  return state_->shared ? state_->shared->num_tokens() : 0;
}

int64_t SuffixCache::num_bytes() const {
  std::lock_guard<std::mutex> guard(state_->mutex);
  return state_->shared ? state_->shared->num_bytes() : 0;
}

std::string SuffixCache::check_integrity() const {
  std::lock_guard<std::mutex> guard(state_->mutex);
  return state_->check();
}

void SuffixCache::save(const std::string& path, const std::string& label) const {
  State& state = *state_;
  std::lock_guard<std::mutex> guard(state.mutex);
  if (state.shared == nullptr) {
    throw std::invalid_argument("a budget is 0, so that there is no shared tree to save");
  }
  FileWriter file(path);
  state.shared->reclaim(state.shared->num_pending_tokens());
  file.section(label.data(), label.size());
  FileHead head{.max_depth = state.depth, .num_requests = state.cached.size};
  file.section(&head, sizeof(head));
  std::vector<int32_t> handles;  // oldest first
  for (int32_t slot = state.cached.first; slot != kNoSlot; slot = state.slots[slot].younger) {
    handles.push_back(state.slots[slot].shared);
  }
  file.section(handles.data(), handles.size() * sizeof(int32_t));
  state.shared->save(file);
  file.finish();
}

std::string SuffixCache::read_label(const std::string& path) {
  FileReader file(path);
  return next_text(file);
}

void SuffixCache::load(const std::string& path) {
  State& state = *state_;
  std::lock_guard<std::mutex> guard(state.mutex);
  if (state.shared == nullptr) {
    throw std::invalid_argument("a budget is 0, so that there is no shared tree to load into");
  }
  if (state.cached.size > 0) {
    throw std::invalid_argument("the cache must have nothing in its shared tree, got " +
                                std::to_string(state.cached.size) + " requests");
  }
  FileReader file(path);
  auto refuse = [&](const std::string& what) {
    throw std::runtime_error("the file '" + path + "' " + what);
  };
  next_text(file);  // the label
  FileHead head{};
  file.section(&head, sizeof(head));
  if (head.max_depth != state.depth) {
    refuse("holds a tree of depth " + std::to_string(head.max_depth) + ", and this cache's is " +
           std::to_string(state.depth));
  }
  std::vector<int32_t> handles(file.section_bytes() / sizeof(int32_t));
  file.section(handles.data(), handles.size() * sizeof(int32_t));
  auto tree = std::make_unique<SuffixTree>(state.options.max_tree_depth);
  tree->load(file);
  file.finish();
  std::vector<int32_t> sorted = handles;
  std::sort(sorted.begin(), sorted.end());
  bool distinct = std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
  bool complete = static_cast<int64_t>(handles.size()) == head.num_requests &&
                  tree->num_sequences() == head.num_requests;
  for (int32_t handle : handles) complete = complete && tree->length(handle) >= 0;
  if (!distinct || !complete) refuse("is damaged: its requests are not those of its tree");
  state.shared = std::move(tree);
  for (int32_t handle : handles) {
    Request& request = state.take_slot();
    request.shared = handle;
    state.cached.push(state.slots, state.slot_of(request));
  }
  while (state.options.max_cached_requests >= 0 &&
         state.cached.size > state.options.max_cached_requests) {
    state.evict(state.slots[state.cached.first]);
  }
  state.keep_within_budgets(0);
  state.shared->reclaim(state.shared->num_pending_tokens());
}

}  // namespace specops
