// Two CUDA devices in the memory of the host, which compute by torch's kernels for the CPU.
//
// Whatever this torch has for CUDA is replaced: kernels, device guard, hooks and allocator. So it works with CPU builds and
// with CUDA builds. fake_cuda.py replaces torch._C._cuda_*, and says how to use it.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/OpMathType.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <chrono>
#include <map>
#include <set>

namespace {
using at::Tensor;
using c10::IValue;
constexpr int kDevices = 2;
const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);
thread_local int current = 0;
thread_local int64_t stream_of[kDevices] = {};
std::recursive_mutex lock;  // of all that follows

// --- memory: the address of a tensor cannot be read; the same memory lies at another one, `host` of it ------------------

constexpr size_t kReserved = size_t(64) << 30, kMemory = size_t(8) << 30;  // of addresses; of each device
char* const host_memory = static_cast<char*>(
    mmap(nullptr, 2 * kReserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
size_t reserved = 0;
long live[kDevices + 1], peak[kDevices + 1];  // the last is of pinned memory
long fail_after = -1, launches = 0;
struct Block {
  size_t size;
  int device;
};
std::map<void*, Block> blocks;
std::multimap<size_t, char*> unused;  // used again, the newest first, as by torch's allocator
void* host(const void* p) { return p ? static_cast<char*>(const_cast<void*>(p)) - kReserved : nullptr; }

void release(void* p) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  auto block = blocks.find(p);
  live[block->second.device] -= block->second.size;
  unused.emplace_hint(unused.lower_bound(block->second.size), block->second.size, static_cast<char*>(p));
  blocks.erase(block);
}

struct Memory final : c10::Allocator {
  static char* take(size_t n, int device) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    size_t size = 512;
    while (size < n) size *= 2;
    bool fails = device < kDevices && fail_after >= 0 && fail_after-- == 0;
    TORCH_CHECK_WITH(OutOfMemoryError, !fails && live[device] + size <= kMemory, "CUDA out of memory. Tried to allocate ", n,
                     " bytes.");
    char* p = host_memory + kReserved + reserved;
    auto old = unused.find(size);
    if (old == unused.end()) reserved += size;
    else p = old->second, unused.erase(old);
    blocks[p] = {size, device};
    live[device] += size;
    peak[device] = std::max(peak[device], live[device]);
    memset(host(p), 0xFF, size);  // NaN, where nothing is written
    return p;
  }
  c10::DataPtr allocate(size_t n) override {
    c10::Device device(c10::kCUDA, current);
    if (!n) return {nullptr, device};
    char* p = take(n, current);
    return {p, p, &release, device};
  }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(host(to), host(from), n); }
} memory;

// Pinned memory is of the same, but at the address that can be read.
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    char* p = Memory::take(n, kDevices);
    return {host(p), p, &release, c10::kCPU};
  }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
} pinned_memory;
bool is_pinned(const void* p) { return p >= host_memory && p < host_memory + kReserved; }

// --- waiting: a copy to pinned memory arrives when somebody waits for the stream, the event or the device ---------------

using Queue = std::pair<int, int64_t>;  // device and stream
struct Pending {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  Tensor view, values;     // of the storage, without owning it; what arrives there
  std::set<Queue> before;  // whoever waits for one of them sees it
};
std::map<long, Pending> pending;
long next_pending = 0;
int mode = 0;  // of set_sync_debug_mode
using Graph = std::vector<std::function<void()>>;
std::vector<Graph> graphs;  // what was computed while each was captured, to be computed again
bool capturing = false;
void (*on_wait)(const char*) = nullptr;

// Every wait comes here. torch.cuda.set_sync_debug_mode does not see all.
void wait(const char* what, bool seen, const std::function<bool(long, const Pending&)>& arrives) {
  TORCH_CHECK(!capturing, "CUDA error: operation not permitted when stream is capturing");
  if (on_wait) on_wait(what);
  TORCH_CHECK(!seen || mode != 2, "called a synchronizing CUDA operation");
  if (seen && mode == 1) TORCH_WARN("called a synchronizing CUDA operation");
  std::lock_guard<std::recursive_mutex> guard(lock);
  for (auto one = pending.begin(); one != pending.end();) {
    if (!arrives(one->first, one->second)) { ++one; continue; }
    if (auto alive = one->second.storage.lock()) one->second.view.copy_(one->second.values);
    one = pending.erase(one);
  }
}
void wait_for_stream(const char* what, Queue queue, bool seen = true) {
  wait(what, seen, [&](long, const Pending& one) { return one.before.count(queue) > 0; });
}
void wait_for_stream(const char* what, int device) { wait_for_stream(what, {device, stream_of[device]}); }
void wait_for_device(int device) {
  wait("synchronize", false, [&](long, const Pending& one) {
    return std::any_of(one.before.begin(), one.before.end(), [&](const Queue& queue) { return queue.first == device; });
  });
}

// --- tensors of the CPU over the memory of a device ---------------------------------------------------------------------

const c10::DispatchKeySet kCpuKeys({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU, c10::DispatchKey::ADInplaceOrView});
Tensor tensor_over(c10::Storage storage, const Tensor& like, c10::DispatchKeySet keys = kCpuKeys) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), keys, like.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  out._set_conj(like.is_conj());
  out._set_neg(like.is_neg());
  return out;
}
c10::Storage storage_over(const c10::Storage& storage, void* data) {
  c10::DataPtr unowned(data, c10::kCPU);
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(unowned), at::getCPUAllocator(), true);
}
Tensor host_view(const Tensor& t) {
  return t.is_cuda() ? tensor_over(storage_over(t.storage(), host(t.storage().data())), t) : t;
}

Tensor device_empty(c10::IntArrayRef size, c10::IntArrayRef stride, c10::ScalarType dtype, c10::Device device) {
  c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &memory, kKeys, dtype);
}
Tensor to_device(const Tensor& t, c10::Device device) {
  auto out = device_empty(t.sizes(), t.strides(), t.scalar_type(), device);
  if (t.numel()) memcpy(host(out.storage().data()), t.const_data_ptr(), out.storage().nbytes());
  out._set_conj(t.is_conj());
  out._set_neg(t.is_neg());
  return out;
}

// The tensors, storages, devices and generators of one call, as the CPU's kernels take them.
struct Call {
  struct View {
    Tensor device, cpu;
  };
  std::vector<View> views;
  std::map<c10::StorageImpl*, std::pair<c10::Storage, c10::Storage>> storages;  // by that of the device; the second is the CPU's
  std::optional<c10::Device> device, asked;
  at::Generator generator;

  c10::Storage cpu(const c10::Storage& storage) {
    auto& both = storages[storage.unsafeGetStorageImpl()];
    if (!both.first) both = {storage, storage_over(storage, host(storage.data()))};
    return both.second;
  }
  Tensor cpu(const Tensor& t) {
    if (!t.defined() || !t.is_cuda() || t.layout() != c10::kStrided) return t;
    for (auto& view : views) if (view.device.is_same(t)) return view.cpu;
    if (!device) device = t.device();
    views.push_back({t, tensor_over(cpu(t.storage()), t)});
    return views.back().cpu;
  }
  IValue cpu(const IValue& v) {
    if (v.isTensor()) return cpu(v.toTensor());
    if (v.isStorage() && v.toStorage().device_type() == c10::kCUDA) return cpu(v.toStorage());
    if (v.isTensorList()) {
      c10::List<Tensor> out;
      for (const Tensor& t : v.toTensorVector()) out.push_back(cpu(t));
      return out;
    }
    if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> out;
      for (const auto& t : v.toOptionalTensorVector()) out.push_back(t ? std::optional(cpu(*t)) : t);
      return out;
    }
    if (v.isDevice() && v.toDevice().is_cuda()) return asked = v.toDevice(), c10::Device(c10::kCPU);
    if (v.isGenerator() && v.toGenerator().device().is_cuda())
      return generator = v.toGenerator(), at::detail::getDefaultCPUGenerator();
    return v;
  }
  c10::Device target() const {
    auto found = device ? *device : asked.value_or(c10::Device(c10::kCUDA, current));
    return found.has_index() ? found : c10::Device(c10::kCUDA, current);
  }

  // The storage of the device for one of the CPU, which may be new.
  c10::Storage back(const c10::Storage& storage) {
    for (auto& [_, both] : storages) if (both.second.is_alias_of(storage)) return both.first;
    auto bytes = tensor_over(storage, at::empty({int64_t(storage.nbytes())}, at::kByte));
    return to_device(bytes, target()).storage();
  }
  Tensor back(const Tensor& t) {
    if (!t.defined() || !t.is_cpu() || t.layout() != c10::kStrided) return t;
    for (auto& view : views) if (view.cpu.is_same(t)) return view.device;
    for (auto& view : views) if (view.cpu.is_alias_of(t)) return tensor_over(view.device.storage(), t, view.device.key_set());
    return to_device(t, target());
  }
  IValue back(const IValue& v) {
    if (v.isTensor()) return back(v.toTensor());
    if (!v.isTensorList()) return v;
    c10::List<Tensor> out;
    for (const Tensor& t : v.toTensorVector()) out.push_back(back(t));
    return out;
  }
  // What the call did to its arguments besides writing into them: resize_, set_, an `out=` of another size.
  void carry_back() {
    for (auto& [_, both] : storages) {
      if (both.second.data() == host(both.first.data())) continue;
      c10::DeviceGuard guard(both.first.device());
      auto fresh = memory.allocate(both.second.nbytes());
      memcpy(host(fresh.get()), both.second.data(), both.second.nbytes());
      both.first.set_data_ptr_noswap(std::move(fresh));
      both.first.set_nbytes(both.second.nbytes());
    }
    for (auto& [device, cpu] : views) {
      auto* impl = device.unsafeGetTensorImpl();
      if (auto storage = back(cpu.storage()); !storage.is_alias_of(device.storage())) impl->set_storage_keep_dtype(storage);
      impl->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }
};

// --- random numbers: as on CUDA the state is a seed and an offset, and known on the host --------------------------------

struct Generator final : c10::GeneratorImpl {
  uint64_t state[2] = {c10::default_rng_seed_val, 0};  // seed, offset
  explicit Generator(int device) : GeneratorImpl(c10::Device(c10::kCUDA, device), kKeys) {}
  void set_current_seed(uint64_t seed) override { state[0] = seed, state[1] = 0; }
  void set_offset(uint64_t offset) override { state[1] = offset; }
  uint64_t get_offset() const override { return state[1]; }
  uint64_t current_seed() const override { return state[0]; }
  uint64_t seed() override { return set_current_seed(c10::detail::getNonDeterministicRandom(true)), state[0]; }
  void set_state(const c10::TensorImpl& from) override {
    TORCH_CHECK(from.numel() == sizeof(state), "RNG state is wrong size");
    memcpy(state, from.data(), sizeof(state));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto out = at::empty({sizeof(state)}, at::kByte);
    memcpy(out.data_ptr(), state, sizeof(state));
    return out.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* out = new Generator(device().index());
    memcpy(out->state, state, sizeof(state));
    return out;
  }
};
const at::Generator& default_generator(int device) {
  static at::Generator all[kDevices] = {at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all[device < 0 ? current : device];
}
// While it lives, the CPU's generator draws what that of the device would.
struct Draws {
  at::Generator cpu = at::detail::getDefaultCPUGenerator(), device;
  Tensor before = cpu.get_state(), start;
  explicit Draws(at::Generator of) : device(std::move(of)) {
    cpu.set_current_seed(device.current_seed() * 2654435761 + device.get_offset());
    start = cpu.get_state();
  }
  ~Draws() {
    if (!cpu.get_state().equal(start)) device.set_offset(device.get_offset() + 4);
    cpu.set_state(before);
  }
};

// --- operations ---------------------------------------------------------------------------------------------------------

// Their results have a size that the host has to know, or they raise for a value.
const std::set<std::string> kWaits = {
    "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount", "equal",
    "repeat_interleave", "histc", "linalg_eigh", "_linalg_eigh", "_linalg_svd"};
const std::set<std::string> kProducts = {
    "mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "addbmm", "mv", "addmv", "dot", "vdot"};
// Some of their arguments may be on the CPU.
const std::set<std::string> kFromAnywhere = {
    "index", "index_put", "index_put_", "_index_put_impl_", "_pack_padded_sequence", "set_"};

// Refuse what CUDA refuses of the arguments of an operation, and return whether it waits.
bool looked_at(const std::string& name, c10::ArrayRef<IValue> arguments) {
  const auto& context = at::globalContext();
  bool is_free = !context.deterministicAlgorithms() || context.deterministicAlgorithmsWarnOnly();
  TORCH_CHECK(is_free || !kProducts.count(name) || getenv("CUBLAS_WORKSPACE_CONFIG"), name,
              " is not deterministic, because it uses CuBLAS and CUBLAS_WORKSPACE_CONFIG is not set");
  bool waits = kWaits.count(name), is_index = name.find("index") != std::string::npos;
  std::optional<c10::Device> first;
  auto look = [&](const Tensor& t) {
    if (!t.defined() || t.is_meta() || (t.is_cpu() && t.dim() == 0)) return;
    TORCH_CHECK(!first || *first == t.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
                *first, " and ", t.device(), "! (", name, ")");
    first = t.device();
  };
  for (const auto& v : arguments) {
    if (is_index && v.isOptionalTensorList())
      for (const std::optional<Tensor> t : v.toOptionalTensorVector())
        waits |= t && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte || t->is_cpu());
    if (kFromAnywhere.count(name)) continue;
    if (v.isTensor()) look(v.toTensor());
    if (v.isTensorList()) for (const Tensor& t : v.toTensorVector()) look(t);
  }
  return waits;
}

// Give arguments a dtype of which the CPU has a kernel, and return the dtype of the result if it is another.
std::optional<c10::ScalarType> widened(const std::string& name, IValue* arguments) {
  const bool is_softmax = name == "_softmax" || name == "_log_softmax";
  const bool is_histogram = name == "histc" && !arguments[0].toTensor().is_floating_point();
  std::optional<c10::ScalarType> narrow;
  if (is_histogram) narrow = arguments[0].toTensor().scalar_type();
  if (is_histogram || (is_softmax && arguments[2].toBool())) arguments[0] = arguments[0].toTensor().to(at::kFloat);
  if (is_softmax) arguments[2] = false;
  if (name == "_softmax_backward_data" || name == "_log_softmax_backward_data") {
    narrow = arguments[3].toScalarType();
    arguments[3] = arguments[0].toTensor().scalar_type();
  }
  return narrow;
}

// Write results of a replay where those of the capture are.
void write(const IValue& to, const IValue& from) {
  auto copy = [](const Tensor& to, const Tensor& from) {
    if (to.defined() && to.is_cuda() && !to.is_alias_of(from)) host_view(to).copy_(host_view(from));
  };
  if (to.isTensor()) copy(to.toTensor(), from.toTensor());
  if (to.isTensorList())
    for (size_t i = 0; i < to.toTensorVector().size(); i++) copy(to.toTensorVector()[i], from.toTensorVector()[i]);
}

void by_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = schema.name().substr(schema.name().find("::") + 2);
  const size_t begin = stack->size() - schema.arguments().size();
  launches++;
  torch::jit::Stack given;
  if (capturing) given.assign(stack->begin() + begin, stack->end());
  const bool waits = looked_at(name, c10::ArrayRef<IValue>(*stack).slice(begin));
  const auto narrow = widened(name, stack->data() + begin);
  Call call;
  for (size_t i = begin; i < stack->size(); i++) (*stack)[i] = call.cpu((*stack)[i]);
  if (waits) wait_for_stream(name.c_str(), call.target().index());
  {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard plain(c10::autocast_dispatch_keyset);
    std::optional<Draws> draws;
    if (call.generator.defined()) draws.emplace(call.generator);
    else if (op.hasTag(at::Tag::nondeterministic_seeded)) draws.emplace(default_generator(call.target().index()));
    op.callBoxed(stack);
    if (narrow) stack->back() = stack->back().toTensor().to(*narrow);
  }
  call.carry_back();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) (*stack)[i] = call.back((*stack)[i]);
  if (!capturing) return;
  torch::jit::Stack results(stack->end() - schema.returns().size(), stack->end());
  graphs.back().push_back([op, given, results] {
    torch::jit::Stack again = given;
    by_cpu(op, {}, &again);
    for (size_t i = 0; i < results.size(); i++) write(results[i], again[i]);
  });
}

template <class T>
using Maybe = std::optional<T>;
Tensor empty(c10::IntArrayRef size, Maybe<c10::ScalarType> dtype, Maybe<c10::Layout>, Maybe<c10::Device> device, Maybe<bool>,
             Maybe<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &memory, kKeys, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, Maybe<c10::ScalarType> dtype, Maybe<c10::Layout>,
                     Maybe<c10::Device> device, Maybe<bool>) {
  return device_empty(size, stride, c10::dtype_or_default(dtype), device.value_or(c10::Device(c10::kCUDA)));
}
at::Scalar item(const Tensor& self) {
  wait_for_stream("item", self.get_device());
  return host_view(self).item();
}
Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  launches++;
  if (self.is_meta() || from.is_meta()) return self;
  if (capturing) graphs.back().push_back([to = self, from]() mutable { copy_(to, from, true); });
  if (self.is_cuda() || !from.is_cuda()) {
    if (from.is_cpu() && !non_blocking) wait_for_stream("copy to the device", self.get_device());
    host_view(self).copy_(host_view(from));
    return self;
  }
  const int device = from.get_device();
  const Queue queue{device, stream_of[device]};
  const auto& storage = self.storage();
  if (non_blocking && is_pinned(storage.data())) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    Tensor values = at::empty_like(self).copy_(host_view(from));
    Tensor view = tensor_over(storage_over(storage, storage.mutable_data()), self);
    view.fill_(self.is_floating_point() || self.is_complex() ? NAN : 85);
    pending.emplace(next_pending++, Pending{storage.getWeakStorageImpl(), view, values, {queue}});
    return self;
  }
  wait_for_stream("copy to the host", queue, !non_blocking);
  self.copy_(host_view(from));
  return self;
}
void copy_all(at::TensorList self, at::TensorList from, bool non_blocking) {
  for (size_t i = 0; i < self.size(); i++) self[i].copy_(from[i], non_blocking);
}

// What torch computes on CUDA by kernels that the CPU lacks, of operations that have their gradients.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& x, const Tensor& h, const Tensor& c, const Maybe<Tensor>& b, const Maybe<Tensor>& d) {
  auto gates = (b && b->defined() ? x + h + *b + *d : x + h).chunk(4, 1);
  auto cell = gates[1].sigmoid() * c + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * cell.tanh(), cell, at::empty({0}, x.options())};
}
std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& x, const Tensor& h, const Tensor& state, const Maybe<Tensor>& b, const Maybe<Tensor>& d) {
  auto given = (b && b->defined() ? x + *b : x).chunk(3, 1), kept = (d && d->defined() ? h + *d : h).chunk(3, 1);
  auto reset = (given[0] + kept[0]).sigmoid(), update = (given[1] + kept[1]).sigmoid();
  auto fresh = (given[2] + reset * kept[2]).tanh();
  return {fresh + update * (state - fresh), at::empty({0}, x.options())};
}
std::tuple<Tensor, Tensor> rms_norm(
    const Tensor& x, c10::IntArrayRef shape, const Maybe<Tensor>& weight, Maybe<double> eps) {
  auto wide = x.to(at::toOpMathType(x.scalar_type()));
  std::vector<int64_t> dims;
  for (int64_t dim = x.dim() - int64_t(shape.size()); dim < x.dim(); dim++) dims.push_back(dim);
  double least = x.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
  auto scale = (wide.square().mean(dims, true) + eps.value_or(least)).rsqrt();
  auto out = wide * scale;
  return {(weight && weight->defined() ? out * *weight : out).to(x.scalar_type()), scale};
}

// --- devices ------------------------------------------------------------------------------------------------------------

struct Event {
  Queue queue;
  std::set<long> before;  // the copies that have arrived with it
  std::chrono::steady_clock::time_point at;
};
int64_t next_stream = 1;
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  static int index(c10::Device d) { return d.has_index() ? d.index() : current; }
  static c10::Stream stream(c10::Device d, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, index(d)), id);
  }
  c10::Device getDevice() const override { return c10::Device(c10::kCUDA, current); }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = getDevice();
    setDevice(d);
    return old;
  }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(index(d) < kDevices, "CUDA error: invalid device ordinal");
    current = index(d);
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current = index(d); }
  c10::Stream getStream(c10::Device d) const override { return stream(d, stream_of[index(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(d, 0); }
  c10::Stream getNewStream(c10::Device d, int) const override { return stream(d, next_stream++); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    stream_of[s.device_index()] = s.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return reinterpret_cast<void*>(s.id()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (!*event) *event = new Event;
    auto& to = *static_cast<Event*>(*event) = {{s.device_index(), s.id()}, {}, std::chrono::steady_clock::now()};
    for (auto& [id, one] : pending) if (one.before.count(to.queue)) to.before.insert(id);
  }
  void block(void* event, const c10::Stream& s) const override {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (event)
      for (long id : static_cast<Event*>(event)->before)
        if (pending.count(id)) pending.at(id).before.insert({s.device_index(), s.id()});
  }
  bool queryEvent(void* event) const override {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (event) for (long id : static_cast<Event*>(event)->before) if (pending.count(id)) return false;
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeEvent(void* event) const override {
    auto* of = static_cast<Event*>(event);
    wait("event.synchronize", false, [&](long id, const Pending&) { return of && of->before.count(id); });
  }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    auto *from = static_cast<Event*>(a), *to = static_cast<Event*>(b);
    TORCH_CHECK(from->queue.first == to->queue.first, "CUDA error: invalid resource handle");
    return std::chrono::duration<double, std::milli>(to->at - from->at).count();
  }
  bool queryStream(const c10::Stream& s) const override {
    std::lock_guard<std::recursive_mutex> guard(lock);
    for (auto& [id, one] : pending) if (one.before.count({s.device_index(), s.id()})) return false;
    return true;
  }
  bool isStreamCapturing(const c10::Stream&) const override { return capturing; }
  void synchronizeStream(const c10::Stream& s) const override {
    wait_for_stream("stream.synchronize", Queue{s.device_index(), s.id()});
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override { wait_for_device(d); }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex current_device() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex d) const override { Guard().setDevice({c10::kCUDA, d}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { return Guard().exchangeDevice({c10::kCUDA, d}).index(); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return d < 0 ? current : exchangeDevice(d); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override {
    static int handed_out = 0;  // the first are torch.cuda.default_generators
    return handed_out < kDevices ? default_generator(handed_out++) : at::make_generator<Generator>(d < 0 ? current : d);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &memory; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  c10::Device getDeviceFromPtr(void* p) const override { return c10::Device(c10::kCUDA, blocks.at(p).device); }
  void deviceSynchronize(c10::DeviceIndex d) const override { wait_for_device(d); }
};

struct Silence final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};
}  // namespace

extern "C" {
int fake_install() {
  if (host_memory == MAP_FAILED || mprotect(host_memory + kReserved, kReserved, PROT_NONE)) return 1;
  c10::SetAllocator(c10::kCUDA, &memory, 255);
  c10::impl::DeviceGuardImplRegistrar(c10::kCUDA, new Guard);
  // torch keeps the hooks that it found first. They have no fields: those here take their place by their functions.
  static Hooks hooks;
  auto& found = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  reinterpret_cast<void**>(&found)[0] = reinterpret_cast<void**>(&hooks)[0];
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(+[](const Tensor&, const Tensor&, const Tensor&, const Maybe<Tensor>&,
                                                              double, bool, Maybe<double>, bool) { return int64_t(0); });

  Silence silence;  // torch warns of kernels that are replaced
  c10::WarningUtils::WarningHandlerGuard silent(&silence);
  auto& dispatcher = c10::Dispatcher::singleton();
  auto* kept = new std::vector<c10::RegistrationHandleRAII>;
  auto kernel = [] { return c10::KernelFunction::makeFromBoxedFunction<&by_cpu>(); };
  // A build for the CPU has no kernels for CUDA: those of the CPU say which operations have one.
  const bool is_built = dispatcher.findSchemaOrThrow("aten::add", "Tensor").hasKernelForDispatchKey(c10::DispatchKey::CUDA);
  const auto like = is_built ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  for (const auto& name : dispatcher.getAllOpNames())
    if (auto op = dispatcher.findOp(name); op && op->hasKernelForDispatchKey(like))
      kept->push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA, kernel(), std::nullopt, nullptr, "fake"));
  if (!dispatcher.hasBackendFallbackForDispatchKey(c10::DispatchKey::CUDA))
    kept->push_back(dispatcher.registerFallback(c10::DispatchKey::CUDA, kernel(), "fake"));
  auto library = [](c10::DispatchKey key) { return new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__); };
  auto* aten = library(c10::DispatchKey::CUDA);
  for (const char* name : {"convolution", "convolution_backward"})  // else torch chooses kernels that the CPU lacks
    aten->impl(name, torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
  for (auto key : {c10::DispatchKey::CUDA, c10::DispatchKey::AutogradCUDA}) {
    auto* cells = library(key);
    cells->impl("_thnn_fused_lstm_cell", &lstm_cell);
    cells->impl("_thnn_fused_gru_cell", &gru_cell);
    cells->impl("_fused_rms_norm", &rms_norm);
  }
  aten->impl("empty.memory_format", &empty);
  aten->impl("empty_strided", &empty_strided);
  aten->impl("_local_scalar_dense", &item);
  aten->impl("copy_", &copy_);
  aten->impl("_foreach_copy_", &copy_all);
  aten->impl("record_stream", [](Tensor&, at::Stream) {});
  return 0;
}
void fake_on_wait(void (*f)(const char*)) { on_wait = f; }
long fake_launches() { return launches; }
long fake_memory(int device, int what) { return what ? peak[device] : live[device]; }
void fake_reset_peak(int device) { peak[device] = live[device]; }
void fake_fail_after(long n) { fail_after = n; }
int fake_mode(int to) { return to < 0 ? mode : mode = to; }
int fake_capturing() { return capturing; }
int fake_capture(int begin) {
  if (begin) graphs.emplace_back();
  capturing = begin;
  return graphs.size() - 1;
}
const char* fake_replay(int graph) {
  static std::string error;
  try {
    for (auto& compute : graphs[graph]) compute();
    return nullptr;
  } catch (const c10::Error& found) {
    return (error = found.what_without_backtrace()).c_str();
  }
}
void fake_forget(int graph) { graphs[graph].clear(); }
double fake_elapsed(void* a, void* b) { return Guard().elapsedTime(a, b, 0); }
int fake_exchange(int device) { return device < 0 ? current : Guard().exchangeDevice(c10::Device(c10::kCUDA, device)).index(); }
long fake_stream(int device, long to) { return to < 0 ? stream_of[device] : stream_of[device] = to; }
}
