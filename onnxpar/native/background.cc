#include "background.h"

#include <utility>

#include "futex.h"

namespace onnxpar {

Background::~Background() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Background::Add(std::function<void()> job) {
  std::lock_guard<std::mutex> lock(mutex_);
  jobs_.push_back(std::move(job));
  if (!thread_.joinable()) thread_ = std::thread([this] { RunJobs(); });
  changed_.notify_all();
}

void Background::Await() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (thread_.get_id() == std::this_thread::get_id()) return;
  changed_.wait(lock, [&] { return jobs_.empty() && !busy_; });
}

void Background::RunJobs() {
  sleeps_at_once = true;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return ending_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    busy_ = true;
    lock.unlock();
    job();
    job = nullptr;  // frees its memory before threads that await the job continue
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

}  // namespace onnxpar
