// Every policy in replay, live and in curves, on random events: the fast replay against the one that goes event by event,
// the live cache against replay, one-pass curves against a replay per size; and a pool that shrinks and grows.
#include "curves_core.hpp"
#include "expect.hpp"
#include "expert_slots_core.hpp"
#include "replay_core.hpp"

using namespace colibri;

static const char* const policies[] = {"lru", "fifo", "clock", "sieve", "lfu", "lfu-in-cache", "lfu-aged", "gate-weighted",
                                       "weighted-lru", "lfru", "colibri-lfru", "lru-k", "slru", "2q", "arc", "s3-fifo",
                                       "random", "layer-aware", "belady", "belady-bypass"};

struct Events {
    int layers, blocks;
    std::vector<int64_t> offsets{0};
    std::vector<uint16_t> experts;
    std::vector<float> weights;
    std::vector<int32_t> layer, sequence;
    std::vector<uint8_t> phase;

    // `repeats` asks for blocks again inside an event, as several tokens of a prompt do.
    Events(int layers, int blocks, int steps, int most, bool repeats, Random& random) : layers(layers), blocks(blocks) {
        std::vector<int> order(blocks);
        for (int step = 0; step < steps; ++step)
            for (int l = 0; l < layers; ++l) {
                if (random.below(20) == 0) continue;  // a layer that did not run
                std::iota(order.begin(), order.end(), 0);
                int n = random.below(15) == 0 ? blocks : 1 + int(random.below(uint32_t(most)));
                for (int i = 0; i < n; ++i) {
                    std::swap(order[i], order[i + random.below(uint32_t(blocks - i) / (random.below(2) + 1) + 1) % (blocks - i)]);
                    experts.push_back(uint16_t(order[repeats ? random.below(uint32_t(i) + 1) : i]));
                    weights.push_back(float(random.below(1000)) / 1000);
                }
                offsets.push_back(int64_t(experts.size()));
                layer.push_back(l);
                phase.push_back(uint8_t(random.below(2)));
                sequence.push_back(step / 17);
            }
    }
    TraceView view() const {
        return {int64_t(layer.size()), offsets.data(), experts.data(), weights.data(), layer.data(), phase.data(), sequence.data()};
    }
};

static bool same(const ReplayResult& a, const ReplayResult& b) {
    for (size_t i = 0; i < a.tally.size(); ++i) {
        const Tally &x = a.tally[i], &y = b.tally[i];
        if (x.events != y.events || x.full_events != y.full_events || x.hits != y.hits || x.misses != y.misses ||
            x.evictions != y.evictions || x.drops != y.drops)
            return false;
    }
    return a.logical_hits == b.logical_hits && a.logical_misses == b.logical_misses;
}

static int64_t hits(const ReplayResult& r) {
    int64_t sum = 0;
    for (const Tally& t : r.tally) sum += t.hits;
    return sum;
}

static void agree(const Events& events, const char* policy, Lookup lookup, bool global, bool reset, Random& random) {
    Stream stream(events.view(), events.layers, events.blocks, global, lookup, Order::random, 5, reset);
    int most = events.blocks * (global ? events.layers : 1);
    ReplaySettings r;
    CacheSettings& c = r.cache;
    c.layers = events.layers, c.blocks = events.blocks, c.global = global, c.lookup = lookup, c.order = Order::random;
    c.policy = policy, c.seed = 5, c.slots = 1 + int(random.below(uint32_t(most) + 2));
    c.admission = Admission(random.below(2));
    if (random.below(3) == 0 && c.slots > 1) r.pins = {{0, 0}};
    if (random.below(3) == 0) r.preload = {{events.layers - 1, 0}, {0, events.blocks - 1}};
    r.first_counted = random.below(3) == 0 ? stream.events() / 3 : 0;
    auto quiet = [] {};
    ReplayResult fast = replay(stream, r, quiet);
    ReplayResult slow = replay(stream, r, quiet, [&](const PolicySetup& setup) { return make_policy(policy, setup); });
    EXPECT(same(fast, slow));
    r.prefetch = {Predictor(1 + random.below(4)), 3, 1 + int(random.below(uint32_t(events.layers))), random.below(2) * 0.7};
    replay(stream, r, quiet);
    if (reset || r.first_counted || !r.pins.empty() || !r.preload.empty()) return;

    ExpertCache live(c, [&](const PolicySetup& setup) { return make_policy(policy, setup); }, 10,
                     std::make_unique<Stream>(events.view(), events.layers, events.blocks, global, lookup, Order::random, 5, false));
    for (size_t e = 0; e < events.layer.size(); ++e)
        live.step(events.layer[e], &events.experts[events.offsets[e]], int(events.offsets[e + 1] - events.offsets[e]),
                  events.phase[e], &events.weights[events.offsets[e]]);
    for (size_t i = 0; i < fast.tally.size(); ++i) {
        EXPECT(live.tally()[i].hits == fast.tally[i].hits && live.tally()[i].misses == fast.tally[i].misses);
        EXPECT(live.tally()[i].evictions == fast.tally[i].evictions && live.tally()[i].drops == fast.tally[i].drops);
    }
}

static void curves(const Events& events, Lookup lookup, bool global, bool reset) {
    Stream stream(events.view(), events.layers, events.blocks, global, lookup, Order::id, 0, reset);
    auto quiet = [] {};
    for (std::string policy : {"lru", "lfu", "belady", "belady-bypass"}) {
        bool forced = policy != "belady-bypass";
        Curve curve = policy == "lru"   ? lru_curve(stream, 0, false, quiet)
                      : policy == "lfu" ? lfu_curve(stream, forced, 0, false, quiet)
                                        : belady_curve(stream, forced, 0, false, quiet);
        int64_t below = 0;
        for (int slots = 1; slots <= curve.most; ++slots) {
            for (int row = 0; row < 2 * events.layers; ++row) below += curve.accesses[size_t(row) * (curve.most + 1) + slots];
            ReplaySettings r;
            r.cache.layers = events.layers, r.cache.blocks = events.blocks, r.cache.global = global, r.cache.lookup = lookup;
            r.cache.policy = policy, r.cache.slots = slots;
            EXPECT(hits(replay(stream, r, quiet)) == below);
        }
    }
}

static void resize(const char* policy, Random& random) {
    CacheSettings c;
    c.layers = 3, c.blocks = 9, c.slots = 4, c.policy = policy, c.global = random.below(2);
    ExpertCache cache(c, [&](const PolicySetup& setup) { return make_policy(policy, setup); });
    for (int e = 0; e < 200; ++e) {
        uint16_t blocks[3];
        for (auto& b : blocks) b = uint16_t(random.below(9));
        cache.step(e % 3, blocks, 3, 1, nullptr);
        if (e % 11 == 0) cache.prefetch((e + 1) % 3, blocks, 3);
        if (e % 7 != 0) continue;
        std::vector<Moved> moves;
        cache.resize(1 + int(random.below(10)), moves);
        for (const Moved& move : moves) EXPECT(cache.occupant(move.to) >= 0);
    }
    cache.reset();
    for (int slot = 0; slot < cache.slot_count(); ++slot) EXPECT(cache.occupant(slot) < 0);
}

int main() {
    Random random(7);
    for (int round = 0; round < 3; ++round) {
        Events events(1 + int(random.below(3)), 2 + int(random.below(9)), 40, 1 + int(random.below(3)) % 2, round % 2, random);
        for (const char* policy : policies)
            for (Lookup lookup : {Lookup::atomic, Lookup::serial, Lookup::serial_hits_first})
                for (bool global : {false, true}) agree(events, policy, lookup, global, random.below(2), random);
        for (Lookup lookup : {Lookup::atomic, Lookup::serial})
            for (bool global : {false, true}) curves(events, lookup, global, round % 3 == 0);
    }
    Events single(1, 200, 1500, 1, false, random);  // one block per event, as in general cache traces: the fastest loop
    for (const char* policy : policies) agree(single, policy, Lookup::atomic, false, false, random);
    curves(Events(1, 40, 500, 1, false, random), Lookup::atomic, false, false);
    for (const char* policy : policies)
        if (std::string(policy).find("belady") == std::string::npos) resize(policy, random);
    EXPECT_THROW(make_policy("mru", PolicySetup{}), std::invalid_argument, "unknown policy 'mru'");
    EXPECT_THROW(make_policy("belady", PolicySetup{}), std::invalid_argument, "must know the future");
}
