// What the programs here check with: EXPECT(condition) ends the program with file, line and the condition's text.
#pragma once
#include <cstdio>
#include <cstdlib>

#define EXPECT(condition)                                                            \
    do {                                                                             \
        if (!(condition)) {                                                          \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);     \
            std::exit(1);                                                            \
        }                                                                            \
    } while (0)

#define EXPECT_THROW(expression, kind, words)                                        \
    do {                                                                             \
        bool thrown = false;                                                         \
        try {                                                                        \
            expression;                                                              \
        } catch (const kind& error) {                                                \
            thrown = std::string(error.what()).find(words) != std::string::npos;     \
            if (!thrown) std::fprintf(stderr, "it says: %s\n", error.what());        \
        }                                                                            \
        EXPECT(thrown && #expression);                                               \
    } while (0)
