#pragma once
// An HTTP server for one file, with ranges, that can break off: what a download meets.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace trireme::testing {

class RangeServer {
 public:
  struct Options {
    bool ranges = true;
    int64_t breaks_after = -1;  ///< bytes of the first answer; -1: it is whole
  };

  RangeServer(std::string body, Options options) : body_(std::move(body)), options_(options) {
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    ::bind(listener_, reinterpret_cast<sockaddr*>(&address), size);
    ::listen(listener_, 8);
    ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    thread_ = std::jthread([this] { serve(); });
  }
  ~RangeServer() {
    ::shutdown(listener_, SHUT_RDWR);  // accept() returns
    thread_.join();
    ::close(listener_);
  }
  RangeServer(const RangeServer&) = delete;
  RangeServer& operator=(const RangeServer&) = delete;

  std::string url(const std::string& name) const {
    return "http://127.0.0.1:" + std::to_string(port_) + "/" + name;
  }
  /// First bytes that were asked for, by request.
  const std::vector<int64_t>& begins() const { return begins_; }

 private:
  void serve() {
    for (;;) {
      const int client = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (client < 0) return;
      answer(client);
      ::close(client);
    }
  }

  void answer(int client) {
    std::string request;
    char buffer[4096];
    while (request.find("\r\n\r\n") == std::string::npos) {
      const ssize_t count = ::recv(client, buffer, sizeof buffer, 0);
      if (count <= 0) return;
      request.append(buffer, static_cast<size_t>(count));
    }
    const std::string kRange = "Range: bytes=";
    const size_t range = request.find(kRange);
    const int64_t asked =
        range == std::string::npos ? 0 : std::atoll(request.c_str() + range + kRange.size());
    begins_.push_back(asked);
    const bool partial = asked > 0 && options_.ranges;
    const std::string body = partial ? body_.substr(static_cast<size_t>(asked)) : body_;
    std::string head = partial ? "HTTP/1.1 206 Partial Content\r\n" : "HTTP/1.1 200 OK\r\n";
    if (partial) {
      head += "Content-Range: bytes " + std::to_string(asked) + "-" + std::to_string(body_.size() - 1) + "/" +
              std::to_string(body_.size()) + "\r\n";
    }
    head += "Content-Length: " + std::to_string(body.size()) + "\r\nConnection: close\r\n\r\n";
    send_all(client, head);
    const bool breaks = begins_.size() == 1 && options_.breaks_after >= 0;
    send_all(client, breaks ? body.substr(0, static_cast<size_t>(options_.breaks_after)) : body);
  }

  static void send_all(int client, const std::string& bytes) {
    size_t sent = 0;
    while (sent < bytes.size()) {
      const ssize_t count = ::send(client, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (count <= 0) return;
      sent += static_cast<size_t>(count);
    }
  }

  const std::string body_;
  const Options options_;
  int listener_ = -1;
  int port_ = 0;
  std::vector<int64_t> begins_;
  std::jthread thread_;
};

}  // namespace trireme::testing
