// A rank of a sharded model, by its environment alone: no Python, no launcher of ours.
//
//   ONNXPAR_RANK=0 ONNXPAR_WORLD_SIZE=2 ONNXPAR_STORE=file:/tmp/store ./rank model.par
//       .../libonnxpar_ops.so x y 4 6 &
//   ONNXPAR_RANK=1 ... the same
//
// feeds input x, float [4, 6], with 0, 0.1, 0.2, ... and prints output y. Variables of mpirun, srun
// and torchrun do as well.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>
#if __has_include(<onnxruntime_c_api.h>)
#include <onnxruntime_c_api.h>
#else
#include "onnxruntime_slots.h"
#endif

const OrtApi* const ort = OrtGetApiBase()->GetApi(18);

void Check(OrtStatus* status) {
  if (status == nullptr) return;
  std::fprintf(stderr, "%s\n", ort->GetErrorMessage(status));
  std::exit(1);
}

const char* Rank() {
  for (const char* name : {"ONNXPAR_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "RANK"}) {
    if (const char* rank = std::getenv(name)) return rank;
  }
  return "0";
}

int main(int argc, char** argv) {
  if (argc < 5) return std::fprintf(stderr, "rank MODEL.par PLUGIN INPUT OUTPUT SIZE...\n"), 2;
  const std::string number = std::to_string(10000 + std::atoi(Rank())).substr(1);
  const std::string file = std::string(argv[1]) + "/rank_" + number + ".onnx";
  std::vector<int64_t> shape;
  size_t count = 1;
  for (int i = 5; i < argc; ++i) count *= shape.emplace_back(std::atoi(argv[i]));
  std::vector<float> x(count);
  for (size_t i = 0; i < count; ++i) x[i] = 0.1f * static_cast<float>(i);

  OrtEnv* env;
  OrtSessionOptions* options;
  OrtSession* session;
  OrtMemoryInfo* memory;
  OrtValue *input, *output = nullptr;
  OrtTensorTypeAndShapeInfo* info;
  void *plugin, *y;
  Check(ort->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "rank", &env));
  Check(ort->CreateSessionOptions(&options));
  Check(ort->RegisterCustomOpsLibrary(options, argv[2], &plugin));  // joins the other ranks
  Check(ort->CreateSession(env, file.c_str(), options, &session));
  Check(ort->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));
  Check(ort->CreateTensorWithDataAsOrtValue(memory, x.data(), count * sizeof(float), shape.data(),
                                            shape.size(), ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
                                            &input));
  Check(ort->Run(session, nullptr, &argv[3], &input, 1, &argv[4], 1, &output));
  Check(ort->GetTensorTypeAndShape(output, &info));
  Check(ort->GetTensorShapeElementCount(info, &count));
  Check(ort->GetTensorMutableData(output, &y));
  for (size_t i = 0; i < count; ++i) std::printf("%.9g\n", static_cast<float*>(y)[i]);
}
