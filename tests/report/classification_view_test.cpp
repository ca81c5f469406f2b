#include "trireme/report/classification_view.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <regex>

#include "tests/report/html_check.h"
#include "tests/report/temporary_folder.h"
#include "trireme/base/file.h"
#include "trireme/base/text.h"
#include "trireme/report/html.h"
#include "trireme/report/page_parts.h"
#include "trireme/report/png.h"
#include "trireme/report/svg.h"

namespace trireme::report {
namespace {

int64_t occurrences(const std::string& text, std::string_view part) {
  int64_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

/// `right` of `each` images of a class are right, the others are taken for the next one.
Classification classified(int64_t classes, int64_t each, int64_t right) {
  Classification all;
  all.step = 1200;
  all.confusion.resize(static_cast<size_t>(classes * classes));
  for (int64_t truth = 0; truth < classes; ++truth) {
    all.classes.push_back("class" + std::to_string(truth));
    all.confusion[static_cast<size_t>(truth * classes + truth)] = right;
    all.confusion[static_cast<size_t>(truth * classes + (truth + 1) % classes)] += each - right;
    all.images += each;
    all.right += right;
  }
  return all;
}

Classification::Mistake mistake(int64_t truth, int64_t guess, double truth_probability) {
  Classification::Mistake one{.sample = 7, .truth = truth, .guess = guess};
  one.loss = -std::log(truth_probability);
  one.guess_probability = 0.875;
  one.truth_probability = truth_probability;
  one.name = "val/a <b>.png";
  one.picture = {.width = 2, .height = 1, .channels = 3, .pixels = {255, 0, 0, 0, 0, 255}};
  return one;
}

/// Of a picture that must be well-formed and become part of a page.
void expect_part_of_a_page(const std::string& svg) {
  EXPECT_TRUE(is_plain_svg(svg)) << svg.substr(0, 400);
  EXPECT_EQ(HtmlCheck(whole_page("picture", Markup::trusted(svg))).problem(), "");
}

/// What `attribute` is at most, so that nothing is drawn outside.
double largest(const std::string& svg, const std::string& attribute) {
  const std::regex number(" " + attribute + "=\"([0-9.]+)\"");
  double most = 0.0;
  for (std::sregex_iterator at(svg.begin(), svg.end(), number), end; at != end; ++at)
    most = std::max(most, std::stod((*at)[1]));
  return most;
}

TEST(Confusion, HasCountsAndSharesOfRows) {
  Classification all = classified(2, 40, 39);
  all.classes = {"cat", "dog"};
  const std::string svg = draw_confusion(all);
  expect_part_of_a_page(svg);
  for (const char* text : {">78 of 80 held-out images are classified correctly (97.5%), after step 1,200<",
                           ">39<", ">97.5%<", ">1<", ">2.5%<", "<title>cat: 39 of 40 (97.5%) correct</title>",
                           "<title>cat predicted as dog: 1 of 40 (2.5%)</title>", ">cat as dog: 1 (2.5%)<",
                           ">dog: 97.5% of 40<"})
    EXPECT_NE(svg.find(text), std::string::npos) << text;
}

TEST(Confusion, IsDrawnForTwoToAThousandClasses) {
  for (const int64_t classes : {2, 10, 11, 24, 25, 100, 101, 1000}) {
    SCOPED_TRACE(classes);
    const std::string svg = draw_confusion(classified(classes, 4, 3));
    expect_part_of_a_page(svg);
    EXPECT_LE(svg.size(), 5U << 20) << "a page takes 8 MiB";
    EXPECT_LE(largest(svg, "x"), largest(svg, "width"));
    EXPECT_LE(largest(svg, "y"), largest(svg, "height"));
    const bool cells = classes <= 100;
    EXPECT_EQ(occurrences(svg, "<title>"), cells ? 2 * classes : 0) << "a tooltip for each cell with images";
    EXPECT_EQ(occurrences(svg, ">class1</text>"), cells ? 2 : 0) << "beside its row and above its column";
    EXPECT_EQ(occurrences(svg, ">3</text>"), classes <= 24 ? classes : 0) << "numbers where they fit";
    EXPECT_EQ(occurrences(svg, "data:image/png;base64,"), cells ? 0 : 1);
    EXPECT_EQ(occurrences(svg, ">class0 as class1: 1 (25.0%)<"), 1);
  }
}

TEST(Confusion, SaysSoWhenNothingIsMistakenAndWhenAClassHasNoImage) {
  Classification all = classified(3, 5, 5);
  all.confusion[4] = 0;
  all.images = all.right = 10;
  const std::string svg = draw_confusion(all);
  expect_part_of_a_page(svg);
  EXPECT_NE(svg.find("No image was misclassified."), std::string::npos);
  EXPECT_EQ(occurrences(svg, ">5</text>"), 4) << "two cells and two rows";
  EXPECT_EQ(occurrences(svg, ">0</text>"), 1);
  EXPECT_EQ(occurrences(svg, ">-</text>"), 1) << "of no image no share is right";
  EXPECT_EQ(occurrences(svg, "nan"), 0);
}

TEST(Confusion, OfNothingIsThereAndOfTooManyClassesIsNot) {
  Classification none = classified(3, 0, 0);
  expect_part_of_a_page(draw_confusion(none));
  none.confusion.clear();
  EXPECT_EQ(draw_confusion(none), "");
}

TEST(Confusion, CountsWhatIsNotFinite) {
  Classification all = classified(3, 5, 5);
  all.not_finite = 2;
  EXPECT_NE(draw_confusion(all).find("2 with non-finite logits are not counted."), std::string::npos);
}

TEST(Classes, AreTextWhateverTheyAreCalled) {
  const std::vector<std::string> names = {"<b>&\"", "</text><script>alert(1)</script>", "\x1b[31m\xff",
                                          std::string(300, 'x'), "\xe6\x97\xa5\xe6\x9c\xac"};
  Classification all = classified(5, 4, 3);
  all.classes = names;
  for (int64_t truth = 0; truth < 5; ++truth) all.worst.push_back(mistake(truth, (truth + 1) % 5, 0.001));
  for (const std::string& svg : {draw_confusion(all), draw_mistakes(all)}) {
    expect_part_of_a_page(svg);
    EXPECT_EQ(occurrences(svg, "<script"), 0);
    EXPECT_EQ(occurrences(svg, "<b>"), 0);
    EXPECT_GE(occurrences(svg, "&lt;b&gt;&amp;&quot;"), 2);
    EXPECT_GE(occurrences(svg, ">\xe6\x97\xa5\xe6\x9c\xac"), 1);
    EXPECT_GE(occurrences(svg, "xxx..."), 1) << "long names are cut";
  }
}

TEST(Mistakes, ShowPicturesWithWhatTheyWereTakenForAndAre) {
  Classification all = classified(3, 10, 8);
  all.worst = {mistake(0, 1, 1e-5), mistake(1, 2, 0.0625)};
  const std::string svg = draw_mistakes(all);
  expect_part_of_a_page(svg);
  for (const char* text : {">The 2 worst of 6 mistakes among 30 held-out images, after step 1,200<",
                           ">class1, 87.5%<", ">is class0, &lt;0.1%<", ">class2, 87.5%<", ">is class1, 6.2%<",
                           "<title>val/a &lt;b&gt;.png: class0 predicted as class1, loss 11.51</title>"})
    EXPECT_NE(svg.find(text), std::string::npos) << text;
  EXPECT_EQ(occurrences(svg, "href=\"data:image/png;base64," + base64(to_png(all.worst[0].picture)) + "\""),
            2);
  EXPECT_EQ(occurrences(svg, "image-rendering=\"pixelated\""), 2) << "two pixels become large";
}

TEST(Mistakes, FillAsManyLinesAsThereAre) {
  Classification all = classified(3, 20, 8);
  for (int i = 0; i < 36; ++i) all.worst.push_back(mistake(0, 1, 0.01));
  EXPECT_NE(draw_mistakes(all).find("All 36 mistakes among 60"), std::string::npos);
  const double of_six_lines = largest(draw_mistakes(all), "height");
  all.worst.resize(30);
  EXPECT_LT(largest(draw_mistakes(all), "height"), of_six_lines);
  EXPECT_LE(largest(draw_mistakes(all), "y"), largest(draw_mistakes(all), "height"));
}

TEST(Mistakes, MayBeNoneAndMayLackTheirPictures) {
  const std::string none = draw_mistakes(classified(3, 5, 5));
  expect_part_of_a_page(none);
  EXPECT_NE(none.find("No mistake among 15 held-out images"), std::string::npos);
  Classification one = classified(3, 5, 5);
  one.right = 14;
  one.worst = {mistake(0, 1, 0.01)};
  one.worst[0].picture = {};
  one.worst[0].loss = std::numeric_limits<double>::infinity();
  const std::string svg = draw_mistakes(one);
  expect_part_of_a_page(svg);
  EXPECT_NE(svg.find("The one mistake among 15"), std::string::npos);
  EXPECT_EQ(occurrences(svg, "<image"), 0);
  EXPECT_NE(svg.find("loss inf"), std::string::npos);
}

TEST(Mistakes, OfLargePicturesFitOnAPage) {
  Classification all = classified(3, 20, 8);
  for (int i = 0; i < 36; ++i) {
    all.worst.push_back(mistake(0, 1, 0.01));
    all.worst.back().picture = {
        .width = 384, .height = 384, .channels = 3, .pixels = std::vector<uint8_t>(3 * 384 * 384, 9)};
  }
  EXPECT_LE(draw_mistakes(all).size(), 3U << 20);
}

TEST(ClassificationJson, HasEveryNumberOfThePictures) {
  Classification all = classified(3, 10, 8);
  all.worst = {mistake(0, 1, 0.25)};
  all.worst[0].loss = std::numeric_limits<double>::infinity();
  const auto json = nlohmann::json::parse(to_json(all));
  EXPECT_EQ(json["schema"], "trireme.validation/1");
  EXPECT_EQ(json["step"], 1200);
  EXPECT_EQ(json["right"], 24);
  EXPECT_EQ(json["confusion"], nlohmann::json::parse("[[8, 2, 0], [0, 8, 2], [2, 0, 8]]"));
  EXPECT_EQ(json["classes"].size(), 3U);
  const auto& one = json["mistakes"][0];
  EXPECT_EQ(one["predicted"], 1);
  EXPECT_EQ(one["loss"], "Infinity") << "as in metrics.jsonl";
  EXPECT_EQ(one["true_probability"], 0.25);
}

TEST(ClassificationFiles, LieInTheRunAndOnItsPage) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(
      root.path(), "digits", {.command = "", .config_yaml = "", .device = "cpu", .mesh = "", .ranks = 1});
  Classification all = classified(3, 10, 8);
  all.worst = {mistake(0, 1, 0.25)};
  write_classification(all, run);
  EXPECT_EQ(read_file(run.file("pictures/confusion.svg")), draw_confusion(all));
  EXPECT_EQ(read_file(run.file("pictures/mistakes.svg")), draw_mistakes(all));
  EXPECT_EQ(read_file(run.file("validation.json")), to_json(all) + "\n");
  all.confusion.clear();
  std::filesystem::remove_all(run.file("pictures"));
  write_classification(all, run);
  EXPECT_FALSE(std::filesystem::exists(run.file("pictures/confusion.svg"))) << "there is no matrix";
}

TEST(PngOfPixels, IsThatOfTheStandard) {
  // Made by Python's zlib and struct modules, with compression level 0.
  const std::string png = to_png({.width = 2, .height = 1, .channels = 3, .pixels = {255, 0, 0, 0, 0, 255}});
  EXPECT_EQ(
      base64(png),
      "iVBORw0KGgoAAAANSUhEUgAAAAIAAAABCAIAAAB7QOjdAAAAEklEQVR4AQEHAPj/AP8AAAAA/wcAAf9VNrrHAAAAAElFTkSuQmCC");
  EXPECT_EQ(to_png({.width = 3, .height = 2, .channels = 1, .pixels = {1, 2, 3, 4, 5, 6}})[25], '\0')
      << "grey";
}

TEST(PngOfPixels, MayBeLargerThanAStoredBlock) {
  const std::string png =
      to_png({.width = 300, .height = 300, .channels = 1, .pixels = std::vector<uint8_t>(300 * 300, 7)});
  // Signature, IHDR, the IDAT chunk's length and name, and zlib's header.
  const std::string stream = png.substr(8 + 25 + 8 + 2);
  EXPECT_EQ(stream.substr(0, 5), std::string("\0\xff\xff\0\0", 5)) << "65535 bytes, and not the last block";
  const size_t rest = 300 * 301 - 65535;
  EXPECT_EQ(stream[5 + 65535], '\1') << "the last";
  EXPECT_EQ(static_cast<uint8_t>(stream[5 + 65535 + 1]), rest & 0xffU);
  EXPECT_EQ(static_cast<uint8_t>(stream[5 + 65535 + 2]), rest >> 8);
}

TEST(PngOfPixels, AreShrunkToTheMeanOfSquares) {
  const Picture small = shrunk(
      {.width = 4, .height = 3, .channels = 1, .pixels = {0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110}},
      2);
  EXPECT_EQ(small.width, 2);
  EXPECT_EQ(small.height, 2);
  EXPECT_EQ(small.pixels, (std::vector<uint8_t>{25, 45, 85, 105}));
  EXPECT_EQ(shrunk(small, 2).pixels, small.pixels) << "small enough";
}

TEST(PlainSvg, MayHoldPixelsButLoadNone) {
  const auto with = [](const std::string& address) { return "<svg><image href=\"" + address + "\"/></svg>"; };
  EXPECT_TRUE(is_plain_svg(with("data:image/png;base64,iVBORw0K+/==")));
  for (const char* address :
       {"http://example.com/x.png", "data:image/svg+xml;base64,PHN2Zz4=", "x.png", "",
        "data:image/png;base64,a\"b", "data:image/png;base64,a b", "javascript:alert(1)"})
    EXPECT_FALSE(is_plain_svg(with(address))) << address;
}

TEST(FittedNames, KeepWholeCharacters) {
  EXPECT_EQ(fitted("short", 100.0, 10.0), "short");
  EXPECT_EQ(fitted("abcdefghij", 48.0, 10.0), "abcde...");
  EXPECT_EQ(fitted("\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4", 30.0, 10.0), "\xc3\xa4\xc3\xa4...");
}

TEST(Shares, AreNoneOrAllOnlyWhenTheyAre) {
  EXPECT_EQ(share_text(0.0), "0.0%");
  EXPECT_EQ(share_text(1e-9), "<0.1%");
  EXPECT_EQ(share_text(0.9999), ">99.9%");
  EXPECT_EQ(share_text(1.0), "100.0%");
}

}  // namespace
}  // namespace trireme::report
