// One decode step through every core, again and again: after the first, none of them may ask for memory.
//
// AddressSanitizer's hooks see every allocation of the process, from whichever thread and by whatever call.
#include "attention_core.hpp"
#include "ffn_core.hpp"
#include "matrices.hpp"
#include "norm_core.hpp"
#include "router_core.hpp"

using namespace colibri;

// From the sanitizer's runtime; gcc has no header for it.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*allocated)(const volatile void*, size_t), void (*freed)(const volatile void*));

static std::atomic<long> allocations{0};

constexpr int kHidden = 128, kWidth = 96, kExperts = 8, kK = 2, kHeads = 4, kHeadDim = 32, kPage = 16, kPast = 40;

struct Model {
    std::vector<Stored> own;  // attention's q, k, v, o, then gate, up, down of each expert, then the router
    std::vector<float> norm_weight, x, h, q, k, v, attended, logits, weights, middle, rows, y, cos, sin, keys, values;
    std::vector<int32_t> table, local, offsets, token_of, row_of, cursor;
    std::vector<uint16_t> ids;
    std::vector<Expert> active;
    Scratch gemm;
    Scratch ffn;

    Model(const Kind& kind, Random& random) {
        for (int i = 0; i < 4; ++i) own.push_back(stored(kind.format, kind.group, kHidden, kHidden, random, kind.symmetric));
        for (int e = 0; e < kExperts; ++e) {
            own.push_back(stored(kind.format, kind.group, kWidth, kHidden, random, kind.symmetric));
            own.push_back(stored(kind.format, kind.group, kWidth, kHidden, random, kind.symmetric));
            own.push_back(stored(kind.format, kind.group, kHidden, kWidth, random, kind.symmetric));
        }
        own.push_back(stored(Format::fp32, 0, kExperts, kHidden, random));
        norm_weight = noise(random, kHidden), x = noise(random, kHidden), cos = noise(random, kHeadDim / 2), sin = cos;
        for (auto* part : {&h, &q, &k, &v, &attended, &y}) part->resize(kHidden);
        logits.resize(kExperts), weights.resize(kK), ids.resize(kK), middle.resize(kK * kWidth), rows.resize(kK * kHidden);
        keys = noise(random, 4 * kPage * kHidden), values = keys, table = {2, 0, 3, 1};
        local.resize(kK), offsets.resize(kK + 1), token_of.resize(kK), row_of.resize(kK), cursor.resize(kK), active.resize(kK);
    }

    void product(int which, const std::vector<float>& in, std::vector<float>& out, bool integer) {
        matmul(in.data(), 1, own[which].matrix, nullptr, out.data(), gemm, 3, 16, integer);
    }

    void step(int past, bool integer) {
        rms_norm(x.data(), norm_weight.data(), 1, kHidden, 1e-5f, h.data(), 3);
        product(0, h, q, integer), product(1, h, k, integer), product(2, h, v, integer);
        rotate(q.data(), cos.data(), sin.data(), 1, kHeads, kHeadDim, kHeadDim, false);
        KvPages kv{reinterpret_cast<uint8_t*>(keys.data()), reinterpret_cast<uint8_t*>(values.data()), kPage * kHidden * 4, table.data(), kPage, kHeads, kHeadDim};
        write_rows<float>(k.data(), kv, kv.k, 1, past);
        write_rows<float>(v.data(), kv, kv.v, 1, past);
        attend<float>(q.data(), kv, 1, kHeads, past, 0, 0.2f, attended.data(), 3);
        product(3, attended, h, integer);
        product(static_cast<int>(own.size()) - 1, h, logits, integer);
        route({RouterKind::softmax, kExperts, kK, nullptr, 1, 1, true, 1.0f}, logits.data(), 1, ids.data(), weights.data(), 3);
        for (int r = 0; r < kK; ++r) {
            const Stored* parts = &own[4 + 3 * ids[r]];
            local[r] = r, active[r] = {parts[0].matrix, parts[1].matrix, parts[2].matrix};
        }
        fill_buckets(local.data(), 1, kK, kK, offsets.data(), token_of.data(), row_of.data(), cursor.data());
        ffn.begin(ffn_scratch_bytes(1, kK, kHidden, kWidth));
        expert_ffn(h.data(), 1, token_of.data(), active.data(), offsets.data(), kK, ffn, middle.data(), rows.data(), 3, 16, true, integer);
        combine(rows.data(), row_of.data(), weights.data(), 1, kK, kHidden, y.data(), 3);
    }
};

// A thread that has only just begun allocates its own bookkeeping, which is not what is counted here.
static void start_threads(int threads) {
    std::atomic<int> here{0};
    parallel_for(threads, threads, [&](int) {
        for (++here; here < threads;) std::this_thread::yield();
    });
}

int main() {
    use_threads();
    start_threads(3);
    Random random(6);
    auto count = [](const volatile void*, size_t) { ++allocations; };
    EXPECT(__sanitizer_install_malloc_and_free_hooks(count, [](const volatile void*) {}) > 0);
    for (const Kind& kind : kKinds)
        for (bool integer : {false, true}) {
            Model model(kind, random);
            long before = allocations;
            model.step(kPast, integer);
            EXPECT(allocations > before);  // scratch grows to its size once, and the counter counts
            before = allocations;
            for (int past = kPast + 1; past < kPast + 20; ++past) model.step(past, integer);
            EXPECT(allocations == before);
        }
}
