// llama.cpp's ids of texts. Argument: a GGUF file. On stdin a uint32 of the bytes that follow for each text: flags (1 add_special, 2 parse_special),
// then the text. On stdout an int32 of the number of ids, then the ids.
#include "llama.h"

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

int main(int, char ** argv) {
    llama_log_set([](ggml_log_level level, const char * line, void *) { if (level == GGML_LOG_LEVEL_ERROR) fputs(line, stderr); }, nullptr);
    llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    const llama_model * model = llama_model_load_from_file(argv[1], params);
    if (!model) {
        return 1;
    }
    uint32_t size = 0;
    while (fread(&size, sizeof size, 1, stdin) == 1) {
        std::string text(size, '\0');
        std::vector<int32_t> ids(20 * size + 8); // NFKC makes up to 18 characters of one
        if (fread(text.data(), 1, size, stdin) != size) {
            return 1;
        }
        const int32_t count = llama_tokenize(llama_model_get_vocab(model), text.data() + 1, size - 1, ids.data(), ids.size(), text[0] & 1, text[0] & 2);
        if (count < 0) {
            return 1;
        }
        fwrite(&count, sizeof count, 1, stdout);
        fwrite(ids.data(), sizeof ids[0], count, stdout);
    }
}
