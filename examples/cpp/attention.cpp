// Attention from C++: the tokens of one sequence look back at what came before them, and a bias makes one key
// preferred. Prints how much each row looks at each key, and how that depends on the bias.
#include <flash_dmattn/attention.h>
#include <flash_dmattn/info.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

using flash_dmattn::DType;

constexpr int kBatch = 1, kTokens = 8, kHeads = 2, kKeyHeads = 1, kHeadDim = 8;
constexpr int kPreferredKey = 2;

void check(const flash_dmattn::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

void expect_near(const char* what, float value, float expected) {
  if (std::abs(value - expected) <= 1e-5f) return;
  std::fprintf(stderr, "%s is %g instead of %g\n", what, value, expected);
  std::exit(1);
}

// Tokens that resemble their neighbours: waves that turn with the position.
std::vector<float> wave(int heads) {
  std::vector<float> tokens;
  for (int token = 0; token < kTokens; ++token) {
    for (int feature = 0; feature < heads * kHeadDim; ++feature) {
      const int frequency = feature % kHeadDim / 2 + 1;
      const float angle = 0.4f * static_cast<float>(token * frequency);
      tokens.push_back(feature % 2 == 0 ? std::cos(angle) : std::sin(angle));
    }
  }
  return tokens;
}

// Feature j of value j is 1 and the rest 0, so that feature j of an output is the weight that key j got.
std::vector<float> unit_values() {
  static_assert(kTokens == kHeadDim && kKeyHeads == 1);
  std::vector<float> value(kTokens * kHeadDim, 0.0f);
  for (int token = 0; token < kTokens; ++token) value[token * kHeadDim + token] = 1.0f;
  return value;
}

// Row `row` of head 0 in a (1, kTokens, kHeads, kHeadDim) tensor.
float* row_of_first_head(std::vector<float>& tokens, int row) { return &tokens[row * kHeads * kHeadDim]; }

void print_weights(std::vector<float>& out) {
  std::printf("weight that each row of head 0 gives to each key; key %d has a bias of 2:\n", kPreferredKey);
  for (int row = 0; row < kTokens; ++row) {
    const float* weights = row_of_first_head(out, row);
    float sum = 0.0f;
    std::printf("  row %d ", row);
    for (int key = 0; key < kTokens; ++key) {
      sum += weights[key];
      if (key <= row) {
        std::printf("  %.3f", weights[key]);
      } else {
        expect_near("the weight of a later key", weights[key], 0.0f);
      }
    }
    std::printf("\n");
    expect_near("the sum of a row's weights", sum, 1.0f);
  }
}

}  // namespace

int main() {
  std::printf("flash_dmattn %s, float32 on %s\n\n", flash_dmattn::version(),
              flash_dmattn::cpu_info().isa_float.c_str());

  const std::vector<float> query = wave(kHeads), key = wave(kKeyHeads), value = unit_values();
  std::vector<float> bias(kTokens, 0.0f);
  bias[kPreferredKey] = 2.0f;

  flash_dmattn::AttentionInputs inputs;
  inputs.query = contiguous_view(query.data(), DType::kFloat32, kBatch, kTokens, kHeads, kHeadDim);
  inputs.key = contiguous_view(key.data(), DType::kFloat32, kBatch, kTokens, kKeyHeads, kHeadDim);
  inputs.value = contiguous_view(value.data(), DType::kFloat32, kBatch, kTokens, kKeyHeads, kHeadDim);
  inputs.bias = contiguous_view(bias.data(), DType::kFloat32, kBatch, 1, kTokens);  // per key, for all heads and rows
  flash_dmattn::AttentionOptions options;
  inputs.visibility.is_causal = true;

  std::vector<float> out(query.size()), lse(kBatch * kHeads * kTokens);
  flash_dmattn::AttentionOutputs outputs;
  outputs.out = contiguous_view(out.data(), DType::kFloat32, kBatch, kTokens, kHeads, kHeadDim);
  outputs.lse = contiguous_view(lse.data(), DType::kFloat32, kBatch, kHeads, kTokens);
  check(attention_forward(inputs, options, outputs));
  print_weights(out);

  // The loss is the weight that the last row of head 0 gives to the preferred key. Only the bias's gradient is wanted.
  constexpr int kLastRow = kTokens - 1;
  std::vector<float> dout(out.size(), 0.0f), dbias(bias.size());
  row_of_first_head(dout, kLastRow)[kPreferredKey] = 1.0f;
  flash_dmattn::AttentionCotangents cotangents;
  cotangents.out = outputs.out;
  cotangents.lse = outputs.lse;
  cotangents.dout = contiguous_view(dout.data(), DType::kFloat32, kBatch, kTokens, kHeads, kHeadDim);
  flash_dmattn::AttentionGradients gradients;
  gradients.dbias = contiguous_view(dbias.data(), DType::kFloat32, kBatch, 1, kTokens);
  check(attention_backward(inputs, cotangents, options, gradients));

  std::printf("\ngradient of the last row's weight of key %d by the bias:\n         ", kPreferredKey);
  for (const float gradient : dbias) std::printf(" %+.3f", gradient);
  std::printf("\n");
  // Softmax: a key's own score changes its weight p by p (1 - p).
  const float weight = row_of_first_head(out, kLastRow)[kPreferredKey];
  expect_near("the gradient of the preferred key", dbias[kPreferredKey], weight * (1.0f - weight));
}
