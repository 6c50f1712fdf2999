"""Who may call which route; any other route is for users. Written down apart from the route table, which it checks."""

PUBLIC = {"/health", "/ready", "/ping", "/health_generate", "/metrics"}
ADMIN_ONLY = {
    "/flush_cache",
    "/internal_state",
    "/inject_fault",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/start_profile",
    "/stop_profile",
    "/configure_logging",
    "/dump_requests",
    "/freeze_gc",
    "/set_internal_state",
    "/pause_generation",
    "/continue_generation",
    "/cancel_weight_update",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/destroy_weights_update_group",
    "/get_weights_by_name",
    "/update_weight_version",
    "/release_memory_occupation",
    "/resume_memory_occupation",
}
