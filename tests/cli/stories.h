#pragma once
// Stories for small children in TinyStories' text format, made up by a rule: small words, few of them.
#include <array>
#include <random>
#include <string>

namespace trireme::cli {

/// `count` stories, each followed by a line <|endoftext|>; the same ones each time.
inline std::string made_up_stories(int count) {
  constexpr std::array kNames = {"Lily", "Tom", "Mia", "Ben", "Sue", "Max"};
  constexpr std::array kAnimals = {"dog", "cat", "bird", "frog", "bunny", "bear"};
  constexpr std::array kPlaces = {"park", "forest", "garden", "house", "beach", "farm"};
  constexpr std::array kThings = {"ball", "kite", "hat", "cake", "boat", "book"};
  constexpr std::array kFeelings = {"happy", "sad", "scared", "proud", "tired", "glad"};
  std::mt19937 draws(1);
  const auto one_of = [&draws](const auto& words) { return std::string(words[draws() % words.size()]); };
  std::string stories;
  for (int i = 0; i < count; ++i) {
    const std::string name = one_of(kNames), thing = one_of(kThings), place = one_of(kPlaces);
    stories += "Once upon a time, there was a " + one_of(kAnimals) + " named " + name + ". " + name +
               " loved to play in the " + place + ".\nOne day, " + name + " saw a " + thing + ". \"Look, a " +
               thing + "!\" said " + name + ". " + name + " was very " + one_of(kFeelings) + ".\nThen " +
               name + " went home.\n<|endoftext|>\n";
  }
  return stories;
}

}  // namespace trireme::cli
