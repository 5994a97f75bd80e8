// A thread that runs jobs one after the other, in the order in which they were added.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace onnxpar {

/// The thread starts with the first job, and sleeps while there is no job. A job must not throw.
class Background {
 public:
  /// Runs the jobs that are left, and ends the thread.
  ~Background();

  void Add(std::function<void()> job);
  /// Returns when all jobs that were added have ended. Called by a job itself, returns at once.
  void Await();

 private:
  void RunJobs();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool busy_ = false;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace onnxpar
