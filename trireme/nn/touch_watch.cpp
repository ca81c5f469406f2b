#include "trireme/nn/torch_internals.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace trireme::nn {
namespace {

constexpr c10::DispatchKey kKey = c10::DispatchKey::DeferredInit;

/// Which watch a storage belongs to. The dispatcher is one for the process, so this is as well; ranks that
/// are threads have storages of their own.
class Registry {
 public:
  struct Entry {
    const Touched* touched;
    const Written* written;
    size_t token;
  };

  void add(const c10::StorageImpl* storage, Entry entry) {
    const std::unique_lock lock(mutex_);
    entries_[storage] = entry;
  }
  void remove(const c10::StorageImpl* storage) {
    const std::unique_lock lock(mutex_);
    entries_.erase(storage);
  }
  bool find(const c10::StorageImpl* storage, Entry& entry) const {
    const std::shared_lock lock(mutex_);
    const auto found = entries_.find(storage);
    if (found == entries_.end()) return false;
    entry = found->second;
    return true;
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, Entry> entries_;
};

Registry& registry() {
  static Registry instance;
  return instance;
}

/// Operators on marked tensors that this thread is inside of.
thread_local int64_t operators_under_way = 0;

struct UnderWay {
  UnderWay() { ++operators_under_way; }
  ~UnderWay() { --operators_under_way; }
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;
};

/// The tokens that an operator uses, by watch: a token means nothing to another watch. Nearly always it is
/// one watch and one token.
class Found {
 public:
  void look_at(const at::Tensor& tensor, bool is_written) {
    if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->key_set().has(kKey)) return;
    Registry::Entry entry{};
    if (!registry().find(tensor.storage().unsafeGetStorageImpl(), entry)) return;
    std::vector<size_t>& tokens = tokens_of(entry.touched);
    if (std::ranges::find(tokens, entry.token) == tokens.end()) tokens.push_back(entry.token);
    if (is_written && *entry.written) writes_.push_back({entry, tensor.storage_offset()});
  }
  void look_at(const c10::IValue& value, bool is_written) {
    if (value.isTensor()) return look_at(value.toTensor(), is_written);
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) look_at(tensor, is_written);
    } else if (value.isList()) {
      for (const c10::IValue& element : value.toListRef()) look_at(element, is_written);
    }
  }
  void report() const {
    const Nesting nesting = operators_under_way == 0 ? Nesting::kOuter : Nesting::kInner;
    for (const Use& use : uses_) (*use.touched)(use.tokens, nesting);
    for (const Write& write : writes_) (*write.entry.written)(write.entry.token, write.offset);
  }

 private:
  struct Use {
    const Touched* touched;
    std::vector<size_t> tokens;
  };
  struct Write {
    Registry::Entry entry;
    int64_t offset;
  };

  std::vector<size_t>& tokens_of(const Touched* touched) {
    const auto known = std::ranges::find(uses_, touched, &Use::touched);
    return known != uses_.end() ? known->tokens : uses_.emplace_back(Use{touched, {}}).tokens;
  }

  std::vector<Use> uses_;
  std::vector<Write> writes_;
};

void before_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  Found found;
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* const alias = arguments[i].alias_info();
    found.look_at(values[i], alias != nullptr && alias->isWrite());
  }
  found.report();
  const UnderWay under_way;
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

void install() {
  static torch::Library library = [] {
    torch::Library made(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    made.fallback(torch::CppFunction::makeFromBoxedFunction<&before_operator>());
    return made;
  }();
}

/// TensorImpl has no public way to add a key of another library.
struct KeyAccess : c10::TensorImpl {
  static void set(c10::TensorImpl& tensor, bool on) {
    c10::DispatchKeySet& keys = tensor.*(&KeyAccess::key_set_);
    keys = on ? keys.add(kKey) : keys.remove(kKey);
  }
};

}  // namespace

TouchWatch::TouchWatch(Touched touched, Written written)
    : touched_(std::move(touched)), written_(std::move(written)) {
  install();
}

TouchWatch::~TouchWatch() {
  for (const Mark& mark : marks_) {
    registry().remove(mark.storage.unsafeGetStorageImpl());
    KeyAccess::set(*mark.tensor.unsafeGetTensorImpl(), false);
  }
}

InUse::InUse(std::initializer_list<at::TensorList> lists) {
  Found found;
  for (const at::TensorList list : lists) {
    for (const at::Tensor& tensor : list) found.look_at(tensor, /*is_written=*/false);
  }
  found.report();
  ++operators_under_way;
}

InUse::~InUse() {
  --operators_under_way;
}

void TouchWatch::mark(const at::Tensor& tensor, size_t token) {
  registry().add(tensor.storage().unsafeGetStorageImpl(), {&touched_, &written_, token});
  KeyAccess::set(*tensor.unsafeGetTensorImpl(), true);
  const auto known =
      std::ranges::find_if(marks_, [&](const Mark& mark) { return mark.tensor.is_same(tensor); });
  if (known == marks_.end()) marks_.push_back({tensor, tensor.storage()});
}

}  // namespace trireme::nn
