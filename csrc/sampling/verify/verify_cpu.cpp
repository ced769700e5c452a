// SPDX-License-Identifier: Apache-2.0
#include "common/parallel.h"
#include "sampling/row/cpu/drafted_row.h"
#include "sampling/row/cpu/target_row.h"
#include "sampling/row/row_rule.h"
#include "sampling/row/uniform_source.h"
#include "sampling/verify/accept_walk.h"
#include "sampling/verify/verify.h"

namespace specops::SPECOPS_ISA {
namespace {

// The verification of one request in this step.
struct VerifyRequest {
  int64_t batch_idx;
  int64_t first;     // first row of logits
  int32_t num_rows;  // 0: idle
  RequestDrafts drafts;
  VerifyStrategy strategy = VerifyStrategy::kTargetMatch;
  AcceptPolicy policy = AcceptPolicy::kNormal;
  SamplingParams filters;    // sampling parameters; temperature 0 under kGreedy
  int32_t num_together = 0;  // drafts that block verification decides together, else 0

  VerifyRequest(const VerifyParams& params, int64_t index) : batch_idx(index) {
    first = params.drafts.output_indptr[index];
    num_rows = static_cast<int32_t>(params.drafts.output_indptr[index + 1] - first);
    if (num_rows == 0) return;  // an idle slot may have any values
    drafts = drafts_of(params.drafts, index, num_rows - 1);
    strategy = static_cast<VerifyStrategy>(params.strategy[index]);
    policy = static_cast<AcceptPolicy>(params.policy[index]);
    filters = filters_of(params.sampling, index);
    if (strategy == VerifyStrategy::kGreedy) filters.temperature = 0.0f;
    if (is_block_step(strategy, policy, drafts, is_greedy(filters)))
      num_together = chain_len(drafts);
  }

  // Returns whether the path of accepted drafts can reach a row.
  bool reaches(int32_t row) const {
    if (row == 0) return num_rows > 0;
    if (row >= num_rows || policy == AcceptPolicy::kRejectAll) return false;
    return num_together > 0 ? row <= num_together : drafts.token_ids[row - 1] >= 0;
  }

  PhiloxSource uniform(const VerifyParams& params, int32_t row) const {
    int32_t start = params.positions[batch_idx];
    uint32_t anchor = num_together > 0 ? block_anchor(start) : 0u;
    return {uniform_key_of(params.sampling, batch_idx, start + row_depth(drafts, row), anchor)};
  }

  RowDraftProbs draft_probs(const VerifyParams& params, int32_t row) const {
    int64_t begin = draft_probs_begin(params, batch_idx, row);
    if (begin < 0) return {};
    return {params.draft_probs.probs + begin,
            params.draft_probs.token_ids ? params.draft_probs.token_ids + begin : nullptr,
            static_cast<int32_t>(params.draft_probs.width)};
  }
};

// Values that the rows of block steps share. Entry [b, i] belongs to row i of request b and the
// draft after it.
struct BlockScratch {
  GrowingArray<double> target_probs;  // target probability of the draft
  GrowingArray<double> draft_probs;   // probability of the draft in the draft distribution
  GrowingArray<double> weights;       // weight of the drafts before the row (next_block_weight)
  GrowingArray<double> masses;        // mass of the row's residual (block_residual)
};
thread_local BlockScratch tls_block;

// Chooses a token in every row, and then walks along the drafts.
// Cost:    one read of num_output_rows * vocab_size logits; with top-p a few passes in L2. With
//          draft_probs, a rejected row is read a second time, and so are a block step's rows.
// Assumes: output_indptr ascending within the rows, at most max_draft_tokens + 1 rows per request.
// Order:   row/cpu/row.h; the result of a row depends only on its request's parameters, drafts and
//          position.
// Source:  Leviathan et al. 2023; Miao et al. 2024 (siblings); Sun et al. 2024 (block).
// Threads: one item per output row, then the walk on the caller. Block steps take two parallel
//          passes over their rows.
template <typename T>
class Verifier {
 public:
  explicit Verifier(const VerifyParams& params)
      : params_(params),
        logits_(static_cast<const T*>(params.logits)),
        capacity_(params.drafts.max_draft_tokens + 1) {}

  void run() {
    // Until the walk, the output arrays have the choices of the rows: that of row i of request b at
    // [b, i].
    bool blocks = false;
    bool may_block = params_.strategy.values != nullptr ||
                     params_.strategy.value == static_cast<int32_t>(VerifyStrategy::kBlock);
    for (int64_t batch_idx = 0; may_block && batch_idx < params_.batch; ++batch_idx) {
      blocks |= VerifyRequest(params_, batch_idx).num_together > 0;
    }
    if (blocks) {
      int64_t size = params_.batch * capacity_;
      target_probs_ = tls_block.target_probs.reserve(size);
      draft_probs_ = tls_block.draft_probs.reserve(size);
      weights_ = tls_block.weights.reserve(size);
      masses_ = tls_block.masses.reserve(size);
    }
    for_each_row([&](const VerifyRequest& request, int32_t row) { decide(request, row); });
    if (blocks) {
      for (int64_t batch_idx = 0; batch_idx < params_.batch; ++batch_idx) {
        weigh_drafts(VerifyRequest(params_, batch_idx));
      }
      for_each_row([&](const VerifyRequest& request, int32_t row) { compare(request, row); });
      parallel_for(params_.batch, row_grain(params_.vocab_size), [&](int64_t begin, int64_t end) {
        for (; begin < end; ++begin) end_block(VerifyRequest(params_, begin));
      });
    }
    for (int64_t batch_idx = 0; batch_idx < params_.batch; ++batch_idx) {
      walk(VerifyRequest(params_, batch_idx));
    }
  }

 private:
  template <typename Visit>
  void for_each_row(Visit&& visit) {
    parallel_for(
        params_.batch * capacity_, row_grain(params_.vocab_size), [&](int64_t begin, int64_t end) {
          for (int64_t item = begin; item < end; ++item) {
            VerifyRequest request(params_, item / capacity_);
            int32_t row = static_cast<int32_t>(item % capacity_);
            if (request.reaches(row)) visit(request, row);
          }
        });
  }

  int64_t item(const VerifyRequest& request, int32_t row) const {
    return request.batch_idx * capacity_ + row;
  }

  bool wants_scores() const { return params_.outputs.logprobs || params_.outputs.ranks; }

  TargetRow<T> target_row(const VerifyRequest& request, int32_t row_idx) const {
    int64_t output_row = request.first + row_idx;
    RowProcessors processors;
    bool any = has_processors(params_.processors);
    if (any) {
      processors = row_processors(params_.processors,
                                  request.batch_idx,
                                  output_row,
                                  params_.positions[request.batch_idx],
                                  {request.drafts.token_ids, request.drafts.parents, row_idx - 1});
    }
    return TargetRow<T>(logits_ + output_row * params_.logits_stride,
                        params_.vocab_size,
                        request.filters,
                        any ? &processors : nullptr,
                        {.logprob = params_.outputs.logprobs != nullptr,
                         .rank = params_.outputs.ranks != nullptr,
                         .processed = params_.processed_logprobs});
  }

  void set_choice(const VerifyRequest& request,
                  int32_t row_idx,
                  TargetRow<T>& row,
                  int32_t choice) {
    int64_t at = item(request, row_idx);
    params_.outputs.token_ids[at] = choice;
    if (params_.outputs.logprobs) params_.outputs.logprobs[at] = row.logprob(token_of(choice));
    if (params_.outputs.ranks) params_.outputs.ranks[at] = row.rank(token_of(choice));
  }

  void decide(const VerifyRequest& request, int32_t row_idx) {
    PhiloxSource uniform = request.uniform(params_, row_idx);
    int32_t child = next_child(request.drafts, row_idx);
    if (row_idx < request.num_together) {
      TargetRow<T> row = target_row(request, row_idx);
      return meet_draft(request, row_idx, row);
    }
    float rate = 0.0f;
    if (request.policy == AcceptPolicy::kSynthetic && child >= 0) {
      rate = params_.accept_rates[request.batch_idx * params_.drafts.max_draft_tokens + child];
    }
    bool certain = is_greedy(request.filters);
    int32_t draft = child >= 0 ? request.drafts.token_ids[child] : -1;
    RowRule rule = row_rule(
        request.strategy, request.policy, draft, params_.vocab_size, rate, certain, uniform);
    if (rule == RowRule::kDraft && !wants_scores()) {
      params_.outputs.token_ids[item(request, row_idx)] = draft;
      return;
    }
    TargetRow<T> row = target_row(request, row_idx);
    int32_t choice = choose_by_rule(
        row, rule, request.drafts, row_idx, request.draft_probs(params_, row_idx), uniform);
    set_choice(request, row_idx, row, rule == RowRule::kEnd ? ends_with(choice) : choice);
  }

  // Records, for block verification, a row's probabilities of the draft after it, and stores the
  // draft as the row's choice.
  void meet_draft(const VerifyRequest& request, int32_t row_idx, TargetRow<T>& row) {
    int64_t at = item(request, row_idx);
    int32_t draft = request.drafts.token_ids[row_idx];
    RowDraftProbs draft_probs = request.draft_probs(params_, row_idx);
    DraftedRow<T> drafted(row.kept(), draft_probs, 1);
    target_probs_[at] = drafted.target_prob(draft);
    draft_probs_[at] = draft_probs.of(draft);
    // If the draft was chosen without randomness, the residual consists of all other tokens for any
    // weight, so store its mass for weight 1.
    if (draft_probs.probs == nullptr) masses_[at] = drafted.compare(1.0, draft);
    // A draft past the vocabulary has no scores and is never accepted.
    if (draft < params_.vocab_size) set_choice(request, row_idx, row, draft);
  }

  void weigh_drafts(const VerifyRequest& request) {
    int64_t first = item(request, 0);
    weights_[first] = 1.0;
    for (int32_t i = 0; i < request.num_together; ++i) {
      weights_[first + i + 1] =
          next_block_weight(weights_[first + i], target_probs_[first + i], draft_probs_[first + i]);
    }
  }

  void compare(const VerifyRequest& request, int32_t row_idx) {
    if (row_idx == 0 || row_idx >= request.num_together) return;
    int64_t at = item(request, row_idx);
    RowDraftProbs draft_probs = request.draft_probs(params_, row_idx);
    if (draft_probs.probs == nullptr) {
      masses_[at] *= weights_[at];
      return;
    }
    TargetRow<T> row = target_row(request, row_idx);
    DraftedRow<T> drafted(row.kept(), draft_probs, 1);
    masses_[at] = drafted.compare(weights_[at], request.drafts.token_ids[row_idx]);
  }

  // Chooses the token after the accepted drafts of a block step. If all drafts are accepted, the
  // last row has already chosen it.
  void end_block(const VerifyRequest& request) {
    if (request.num_together == 0) return;
    int64_t first = item(request, 0);
    auto coin = [&](int32_t i) { return request.uniform(params_, i)(Purpose::kAccept, 0); };
    int32_t accepted =
        block_accepted(weights_ + first, masses_ + first, request.num_together, coin);
    if (accepted == request.num_together) return;
    TargetRow<T> row = target_row(request, accepted);
    DraftedRow<T> drafted(row.kept(), request.draft_probs(params_, accepted), 1);
    drafted.compare(weights_[first + accepted], request.drafts.token_ids[accepted]);
    int32_t token_id = drafted.draw(request.uniform(params_, accepted)(Purpose::kResidual, 0));
    set_choice(request, accepted, row, ends_with(token_id));
  }

  void walk(const VerifyRequest& request) {
    int64_t first = item(request, 0), node = request.batch_idx * params_.drafts.max_draft_tokens;
    params_.outputs.num_accepted_tokens[request.batch_idx] = accept_walk(
        request.drafts,
        request.num_rows,
        static_cast<int32_t>(capacity_),
        {params_.outputs.token_ids + first,
         params_.outputs.logprobs ? params_.outputs.logprobs + first : nullptr,
         params_.outputs.ranks ? params_.outputs.ranks + first : nullptr,
         params_.outputs.accepted_nodes ? params_.outputs.accepted_nodes + node : nullptr});
  }

  VerifyParams params_;
  const T* logits_;
  int64_t capacity_;
  double* target_probs_ = nullptr;
  double* draft_probs_ = nullptr;
  double* weights_ = nullptr;
  double* masses_ = nullptr;
};

}  // namespace

void verify_cpu(const VerifyParams& params) {
  return params.dtype == DType::kBFloat16 ? Verifier<bfloat16>(params).run()
                                          : Verifier<float>(params).run();
}

}  // namespace specops::SPECOPS_ISA
