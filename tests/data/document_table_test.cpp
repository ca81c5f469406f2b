// Tables of documents: a document ends with its end token, and none goes over the edge of a sequence.
#include "trireme/data/document_table.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

#include "trireme/data/loader.h"

namespace trireme::data {
namespace {

std::vector<int32_t> numbers_of(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.contiguous().flatten();
  const auto* const first = flat.const_data_ptr<int32_t>();
  return {first, first + flat.numel()};
}

TEST(DocumentTable, EndTokensBelongToWhatTheyEnd) {
  const DocumentTable table = document_table(at::tensor({7, 8, 0, 9, 0, 0, 5, 6}, at::kLong).view({1, 8}), 0);
  EXPECT_EQ(numbers_of(table.starts), (std::vector<int32_t>{0, 0, 0, 3, 3, 5, 6, 6}));
  EXPECT_EQ(numbers_of(table.ends), (std::vector<int32_t>{0, 3, 5, 6, 8}));
}

TEST(DocumentTable, SequencesBeginDocumentsWhateverCameBefore) {
  // The first sequence ends within a document, the second with an end token.
  const DocumentTable table = document_table(at::tensor({1, 0, 2, 3, 4, 5, 6, 0}, at::kLong).view({2, 4}), 0);
  EXPECT_EQ(table.starts.sizes(), (std::vector<int64_t>{2, 4}));
  EXPECT_EQ(numbers_of(table.starts), (std::vector<int32_t>{0, 0, 2, 2, 0, 0, 0, 0}));
  EXPECT_EQ(numbers_of(table.ends), (std::vector<int32_t>{0, 2, 4, 8}));
}

/// A GPU spends time on documents that are empty.
TEST(DocumentTable, HasNoEmptyDocuments) {
  const auto count = [](const at::Tensor& tokens) { return document_table(tokens, 0).ends.size(0) - 1; };
  const at::Tensor whole = at::ones({3, 512}, at::kLong);
  at::Tensor several = whole.clone();
  several.narrow(1, 0, 5).zero_();
  EXPECT_EQ(count(whole), 3);
  EXPECT_EQ(count(several), 18);
  EXPECT_EQ(count(at::zeros({3, 512}, at::kLong)), 1536);  // as many documents as tokens
}

TEST(DocumentTable, ReadsTokensThatAreNotContiguous) {
  const at::Tensor wide = at::tensor({1, 0, 2, 9, 4, 5, 0, 9}, at::kLong).view({2, 4});
  const DocumentTable table = document_table(wide.narrow(1, 0, 3), 0);
  EXPECT_EQ(numbers_of(table.starts), (std::vector<int32_t>{0, 0, 2, 0, 0, 0}));
}

/// Sample i is i + 1, 0, i + 1, 0, ...
class TokensInPairs : public TokenSamples {
 public:
  int64_t size() const override { return 8; }
  int64_t seq_len() const override { return 5; }
  uint64_t digest() const override { return 0; }
  void read(int64_t index, std::span<int64_t> tokens) const override {
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = i % 2 == 0 ? index + 1 : 0;
  }
};

TEST(DocumentTable, ComesWithTheBatchesOfALoaderThatKnowsTheEndToken) {
  LoaderOptions options{.sampler = {.samples = 8}, .global_batch = 2, .micro_batch = 2};
  EXPECT_FALSE(Loader(std::make_shared<TokensInPairs>(), options).next().documents.starts.defined());
  options.end_token = 0;
  const Batch batch = Loader(std::make_shared<TokensInPairs>(), options).next();
  EXPECT_EQ(numbers_of(batch.documents.starts), (std::vector<int32_t>{0, 0, 2, 2, 4, 0, 0, 2, 2, 4}));
  EXPECT_EQ(numbers_of(batch.documents.ends), (std::vector<int32_t>{0, 2, 4, 5, 7, 9, 10}));
}

}  // namespace
}  // namespace trireme::data
